"""`jhpt launch`: the processes of a run on this machine, or the files that start them on a cluster."""

import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import tyro

from jhpt.core.errors import InputError
from jhpt.core.files import check_writable, replacing
from jhpt.core.presets import DEFAULT
from jhpt.flags import source_of, value_of, without
from jhpt.launch import GO_BACK, Launch, launched
from jhpt.launch_files import Claim, Job, jobset, longest_pod_name, slurm_script
from jhpt.training.step_folders import FOLDER

SLURM_NAME = (r"[A-Za-z0-9._-]+", "letters, digits, dots, hyphens and underscores")
POD_NAME = (r"[a-z]([a-z0-9-]*[a-z0-9])?", "small letters, digits and hyphens, a letter first and no hyphen last")
"""What the name of a job may be: a pattern, and in words."""

LONGEST_LABEL = 63
"""Characters of a label in DNS (RFC 1035), which the name of a pod has to be."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Starts jhpt train as several processes, and again from the last good step when one fails.

    jhpt launch --processes N -- train ARGUMENTS
    jhpt launch --slurm|--kubernetes --out FILE -- train ARGUMENTS
    """

    processes: int | None = None
    """Processes on this machine, which share its GPUs evenly."""
    min_processes: int | None = None
    """Go on with fewer, down to these, if one fails again and again. Default: all."""
    max_restarts: int = 100
    """Attempts after the first one."""
    pause: float | None = None
    """Seconds before a restart, doubled with each that follows without a new checkpoint, at most 60. Default: 1."""
    slurm: bool = False
    """Write a script for sbatch instead."""
    kubernetes: bool = False
    """Write a JobSet instead."""
    out: str | None = None
    """File of the script or JobSet."""
    nodes: int | None = None
    """Nodes of the job. Default: 1."""
    gpus: int | None = None
    """GPUs of each node; 0: a process on each node, on its CPUs. Default: 8."""
    cpus: int | None = None
    """Cores of each process. Default: the scheduler's, for SLURM often 1."""
    time: str | None = None
    """Time limit of the job, as SLURM writes it. Default: 24:00:00."""
    image: str | None = None
    """Container image with jhpt, for Kubernetes. Default: jhpt:latest."""
    claim: str | None = None
    """NAME:/PATH of a PersistentVolumeClaim that all pods mount, for Kubernetes; the run's --out is in it."""
    name: str | None = None
    """Of the job. Default: the configuration's."""


MOST_PROCESSES = 1024
"""On this machine."""


def launch_command(arguments: list[str]) -> int:
    """`jhpt launch OPTIONS -- train ARGUMENTS`."""
    own, train = _divided(arguments)
    options = tyro.cli(LaunchOptions, prog="jhpt launch", args=own, config=(tyro.conf.FlagCreatePairsOff,))
    if options.max_restarts < 0:
        raise InputError("--max-restarts cannot be negative")
    if options.slurm and options.kubernetes:
        raise InputError("give one of --slurm and --kubernetes")
    if not options.slurm and not options.kubernetes:
        _refuse_ignored(options, ("nodes", "gpus", "cpus", "time", "image", "claim"), "--slurm or --kubernetes")
        if options.out is not None:
            raise InputError("--out before -- is the file of --slurm or --kubernetes; give the run's behind it")
        return _run(options, train)
    _refuse_ignored(options, ("processes", "min_processes", "pause"), "this machine; give --nodes and --gpus")
    if options.slurm:
        _refuse_ignored(options, ("image", "claim"), "--kubernetes")
        return _write(slurm_script(_job(options, train), _time(options.time)), options.out, "sbatch")
    _refuse_ignored(options, ("time",), "--slurm")
    job = _job(options, train)
    return _write(
        jobset(job, options.image or "jhpt:latest", _claim(options.claim, job)), options.out, "kubectl apply -f"
    )


def _refuse_ignored(options: LaunchOptions, names: Sequence[str], where: str) -> None:
    """Refuses those of these options that are given."""
    if given := [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]:
        raise InputError(f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} only for {where}")


def _divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(the launcher's own arguments, those of `jhpt train`)."""
    if "--" not in arguments:
        if "--help" in arguments or "-h" in arguments:
            return arguments, []
        raise InputError("give what to launch behind --: jhpt launch --processes 2 -- train gpt-tiny --out runs/mine")
    at = arguments.index("--")
    own, command = arguments[:at], arguments[at + 1 :]
    if command[:1] != ["train"]:
        raise InputError(f"jhpt launch starts jhpt train; behind -- comes train, not {' '.join(command[:1])!r}")
    for flag in ("--coordinator", "--process-id", "--num-processes"):
        if value_of(flag, command) is not None:
            raise InputError(f"jhpt launch sets {flag} by itself; leave it out")
    return own, command[1:]


def _configuration(train: list[str]) -> str:
    return Path(source_of(list(train)) or DEFAULT).stem


def _job_name(options: LaunchOptions, train: list[str]) -> str:
    """The name that is given, or the configuration's with a hyphen for what is not allowed."""
    if options.name is None and options.slurm:
        return re.sub(r"[^A-Za-z0-9._-]", "-", _configuration(train))
    if options.name is None:
        name = re.sub(r"[^a-z0-9]+", "-", _configuration(train).lower()).strip("-")
        return name if name[:1].isalpha() else f"jhpt-{name}".strip("-")
    pattern, words = SLURM_NAME if options.slurm else POD_NAME
    if not re.fullmatch(pattern, options.name):
        raise InputError(f"--name {options.name!r} is not made of {words}")
    return options.name


def _job(options: LaunchOptions, train: list[str]) -> Job:
    for option, least in (("nodes", 1), ("gpus", 0), ("cpus", 1)):
        value = getattr(options, option)
        if value is not None and value < least:
            raise InputError(f"--{option} {value} is below {least}")
    out = value_of("--out", train)
    if not out:
        raise InputError("give the run's --out behind --, on a file system that all nodes share: restarts go on there")
    if value_of(GO_BACK, train) is not None:
        raise InputError(
            f"leave out {GO_BACK}, because the job would go back at each of its restarts; instead, rename the later "
            f"folders in {out}/{FOLDER}, such as 600 to 600.left"
        )
    return Job(
        name=_job_name(options, train),
        arguments=tuple(train),
        out=out,
        nodes=options.nodes or 1,
        gpus=8 if options.gpus is None else options.gpus,
        cpus=options.cpus,
        max_restarts=options.max_restarts,
    )


def _time(limit: str | None) -> str:
    if limit is not None and not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED", limit):
        raise InputError(f"--time {limit!r} is no time limit of SLURM, such as 30 (minutes), 24:00:00 or 7-00:00:00")
    return limit or "24:00:00"


def _claim(text: str | None, job: Job) -> Claim:
    name, _, path = (text or "").partition(":")
    if not name or not PurePosixPath(path).is_absolute() or ":" in path:
        raise InputError(
            "give --claim NAME:/PATH, a PersistentVolumeClaim that all pods mount; other files go with their pod"
        )
    if not PurePosixPath(job.out).is_relative_to(path):
        raise InputError(f"the run's --out {job.out} is not in {path}, where --claim {name} is mounted")
    if len(pod := longest_pod_name(job)) > LONGEST_LABEL:
        raise InputError(f"pods would be called {pod}, more than {LONGEST_LABEL} characters; give a shorter --name")
    return Claim(name=name, path=path)


def _write(text: str, out: str | None, command: str) -> int:
    if out is None:
        raise InputError(f"give --out FILE for the {'script' if command == 'sbatch' else 'JobSet'}")
    check_writable("--out", out)
    with replacing(out) as partial:
        partial.write_text(text)
    print(f"{out}: {command} {out}")
    return 0


def _run(options: LaunchOptions, train: list[str]) -> int:
    processes, fewest, pause = options.processes, options.min_processes, options.pause
    if processes is None or processes < 1:
        raise InputError("give --processes N, how many processes to start on this machine, at least 1")
    if not 1 <= (processes if fewest is None else fewest) <= processes:
        raise InputError(f"--min-processes {fewest} is not between 1 and --processes {processes}")
    if pause is not None and not 0 <= pause < math.inf:
        raise InputError(f"--pause {pause:g} is not a number of seconds")
    if processes > MOST_PROCESSES:
        raise InputError(f"--processes {processes} is more than the {MOST_PROCESSES} that one machine may start")
    out = value_of("--out", train)
    if out is None:
        out = f"runs/{options.name or _configuration(train)}-{time.strftime('%Y%m%d-%H%M%S')}"
        print(f"run directory: {out}")
    else:
        train = without("--out", train)
    launch = Launch(
        arguments=tuple(train),
        out=Path(out),
        processes=processes,
        fewest=fewest or processes,
        max_restarts=options.max_restarts,
        pause=1.0 if pause is None else pause,
    )
    return launched(launch, lambda line: print(line, file=sys.stderr, flush=True))
