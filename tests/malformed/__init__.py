"""Malformed input: generators, and processes with limits that run commands on what they make.

`python -m tests.malformed NAME` (plan-17, symlink_loop) makes the files of a case in a temporary folder, shows the
command, and runs it; without a name it lists all.
"""
