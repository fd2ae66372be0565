"""`jhpt launch`: the processes of a run on this machine, or the files that start them on a cluster."""

import sys
import time
from pathlib import Path

import tyro

from jhpt.core.errors import InputError
from jhpt.core.files import check_writable, replacing
from jhpt.core.presets import DEFAULT
from jhpt.flags import source_of, value_of
from jhpt.launch import Launch, launched
from jhpt.launch_files import Job, jobset, slurm_script

MOST_PROCESSES = 1024
"""On this machine."""


def launch_command(arguments: list[str]) -> int:
    """`jhpt launch OPTIONS -- train ARGUMENTS`."""
    own, train = _divided(arguments)

    def launch(
        processes: int | None = None,
        min_processes: int | None = None,
        max_restarts: int = 100,
        pause: float = 1.0,
        slurm: bool = False,
        kubernetes: bool = False,
        out: str | None = None,
        nodes: int = 1,
        gpus: int = 8,
        time: str = "24:00:00",
        image: str = "jhpt:latest",
        name: str | None = None,
    ) -> int:
        """Starts jhpt train as several processes, and again from the last good step when one fails.

        jhpt launch --processes N -- train ARGUMENTS
        jhpt launch --slurm|--kubernetes --out FILE -- train ARGUMENTS

        Args:
            processes: processes on this machine, which share its GPUs evenly.
            min_processes: go on with fewer, down to these, if one fails again and again. Default: all.
            max_restarts: attempts after the first one.
            pause: seconds before a restart, doubled with each that follows without a new checkpoint, at most 60.
            slurm: write a script for sbatch instead.
            kubernetes: write a JobSet instead.
            out: file of the script or JobSet.
            nodes: nodes of the job.
            gpus: GPUs of each node.
            time: time limit of the job, as SLURM writes it.
            image: container image with jhpt, for Kubernetes.
            name: of the job. Default: the configuration's.
        """
        known = name or Path(source_of(list(train)) or DEFAULT).stem
        if slurm or kubernetes:
            job = Job(
                name=known, arguments=tuple(train), nodes=nodes, gpus=gpus, time=time, image=image,
                max_restarts=max_restarts,
            )  # fmt: skip
            return _write(job, slurm, kubernetes, processes, out, train)
        if out is not None:
            raise InputError("--out before -- is the file of --slurm or --kubernetes; give the run's behind it")
        return _run(train, known, processes, min_processes, max_restarts, pause)

    return tyro.cli(launch, prog="jhpt launch", args=own, config=(tyro.conf.FlagCreatePairsOff,))


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


def _write(job: Job, slurm: bool, kubernetes: bool, processes: int | None, out: str | None, train: list[str]) -> int:
    if slurm and kubernetes:
        raise InputError("give one of --slurm and --kubernetes")
    if processes is not None:
        raise InputError("--processes is for this machine; with --slurm and --kubernetes give --nodes and --gpus")
    if out is None:
        raise InputError(f"give --out FILE for the {'script' if slurm else 'JobSet'}")
    if value_of("--out", train) is None:
        raise InputError("give the run's --out behind --, on a file system that all nodes share: restarts go on there")
    check_writable("--out", out)
    with replacing(out) as partial:
        partial.write_text(slurm_script(job) if slurm else jobset(job))
    print(f"{out}: {'sbatch' if slurm else 'kubectl apply -f'} {out}")
    return 0


def _run(
    train: list[str], name: str, processes: int | None, fewest: int | None, max_restarts: int, pause: float
) -> int:
    if processes is None or processes < 1:
        raise InputError("give --processes N, how many processes to start on this machine, at least 1")
    if not 1 <= (fewest or processes) <= processes:
        raise InputError(f"--min-processes {fewest} is not between 1 and --processes {processes}")
    if processes > MOST_PROCESSES:
        raise InputError(f"--processes {processes} is more than the {MOST_PROCESSES} that one machine may start")
    if max_restarts < 0 or pause < 0:
        raise InputError("--max-restarts and --pause cannot be negative")
    out = value_of("--out", train)
    if out is None:
        out = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        print(f"run directory: {out}")
    else:
        train = _without_out(train)
    launch = Launch(
        arguments=tuple(train),
        out=Path(out),
        processes=processes,
        fewest=fewest or processes,
        max_restarts=max_restarts,
        pause=pause,
    )
    return launched(launch, lambda line: print(line, file=sys.stderr, flush=True))


def _without_out(train: list[str]) -> list[str]:
    at = next(number for number, word in enumerate(train) if word == "--out" or word.startswith("--out="))
    return train[:at] + train[at + (2 if train[at] == "--out" else 1) :]
