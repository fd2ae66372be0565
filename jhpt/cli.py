"""The command line: `jhpt COMMAND ...`, with the exit statuses of `jhpt.core.errors.Exit`."""

import errno
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jhpt.bench.registry import NAMES, PACKAGED, Benchmark, load
from jhpt.cli_huggingface import export_command, import_command
from jhpt.cli_interop import eval_command, generate_command, score_command
from jhpt.cli_launch import launch_command
from jhpt.cli_plan import plan_command
from jhpt.cli_tokenizer import tokenizer_command
from jhpt.cli_verify import verify_command
from jhpt.core.crash import crash_report
from jhpt.core.divisors import one_of
from jhpt.core.errors import Exit, InputError, JhptError, did_you_mean, for_terminal
from jhpt.core.load import load_config, run_config
from jhpt.core.presets import DEFAULT, PRESETS
from jhpt.core.unused import check_plan_alone
from jhpt.flags import ProfileOptions, parse_overrides, source_of, value_of, with_family, with_words

USAGE = f"""usage: jhpt COMMAND [ARGUMENTS]

  jhpt train [CONFIG|PRESET] [--out DIR] [--init RUN|HF_DIR] [--section.key value ...]
                        train a model, or go on with the run in DIR; without arguments: {DEFAULT}
  jhpt plan [CONFIG|PRESET|NETWORK] [--cluster NAME|FILE] [--out FILE] [--section.key value ...]
                        the fastest way to divide a step over a cluster, why, and what it costs; needs no device
  jhpt plan [CONFIG|PRESET|NETWORK] --clusters A,B,... [--price PRICE]
                        clusters compared, the best first; jhpt plan --list-clusters: those that are known
  jhpt profile [CONFIG|PRESET] [--out FILE] [--cluster-out FILE] [--section.key value ...]
                        measure a model's layers and this machine, for jhpt plan
  jhpt import hf DIR --out RUN, jhpt export hf RUN DIR
                        weights from and to Hugging Face's layout: GPT-2, Llama, Mistral, Qwen2, BERT
  jhpt tokenizer train FILES --vocab-size N [--kind bpe|wordpiece] [--out FILE]
                        make a tokenizer of your text, for data.tokenizer
  jhpt generate RUN --prompt TEXT [--tokens N] [--greedy] [--temperature T] [--top-k K] [--top-p P]
                        text that continues a prompt, or many of a file (--prompts)
  jhpt eval RUN [--data.path FILES] [--documents FILE --out FILE] [--parallel.key value ...]
                        loss and perplexity on any text, or the log-likelihood of every document
  jhpt score RUN --tokens FILE.npy --out FILE.npy
                        logits of given tokens
  jhpt launch --processes N -- train ARGUMENTS
                        the processes of a run, started again from the last good step when one fails;
                        --slurm or --kubernetes: the files that do so on a cluster
  jhpt verify RUN       whether every checkpoint is what was written
  jhpt bench NAME [--quick] [--json FILE]
                        measure; NAME: {one_of(NAMES)}
  jhpt doctor           what this machine can do
  jhpt COMMAND --help   all options of a command

presets: {", ".join(PRESETS)}
networks, for plan: vgg16, resnet50, gnmt
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("--help", "-h", "help"):
        print(USAGE)
        return 0
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        print(f"jhpt: unknown command {command!r}{hint}; commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return Exit.INPUT
    try:
        return COMMANDS[command](rest)
    except JhptError as error:
        print(f"jhpt {command}: {for_terminal(str(error))}", file=sys.stderr)
        return error.status
    except BrokenPipeError:  # the reader of the output has closed it, as in `jhpt train --help | head`
        return 0
    except KeyboardInterrupt:
        print(f"jhpt {command}: interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except OSError as error:
        if error.errno not in NO_PLACE:
            return _crashed(command, rest, error)
        place = for_terminal(str(error.filename or "what the command writes"))
        print(f"jhpt {command}: {place}: {error.strerror}; give another path", file=sys.stderr)
        return Exit.INPUT
    except Exception as error:
        return _crashed(command, rest, error)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a library in Rust, which derives it from BaseException
            raise
        return _crashed(command, rest, error)


NO_PLACE = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of places, wherever they are used first: too long a name, links in a circle, a disk that is full or read-only.
Training notices those of its disk by itself."""


def _crashed(command: str, rest: Sequence[str], error: BaseException) -> Exit:
    print(f"jhpt {command}: {crash_report(error, [command, *rest])}", file=sys.stderr)
    return Exit.CRASH


def train_command(arguments: list[str]) -> int:
    """`jhpt train`: the first argument, if it is no flag, names a preset or a YAML file."""
    source, words = source_of(arguments), list(arguments)
    weights = None
    if (init := value_of("--init", arguments)) is not None:
        from jhpt.training.init_from import weights_at  # other commands start without what reads weights

        weights = weights_at(Path(init))
    config = run_config(source, value_of("--out", arguments), weights)
    base = with_words(with_family(config, arguments), arguments)
    words = [word for word in words if word not in arguments]
    options, overrides = parse_overrides("jhpt train", base, arguments)
    if options.wait is not None:
        overrides["peers.wait_seconds"] = options.wait
    config = load_config(base, overrides)
    if options.out is not None and not options.out.strip():
        raise InputError("--out is empty; give a directory, or leave it out")
    if options.plan is not None:
        check_plan_alone([*overrides, *(word.removeprefix("--").partition("=")[0] for word in words)])

    # jax takes a second to import, so it is imported only after a typing mistake would have been reported.
    from jhpt.training.processes import Processes
    from jhpt.training.run import train

    processes = Processes(
        coordinator=options.coordinator, process_id=options.process_id, num_processes=options.num_processes
    )
    result = train(
        config,
        out=options.out,
        plan=options.plan,
        init=options.init,
        resume_step=options.resume_step,
        processes=processes,
    )
    if not result.finite:
        return Exit.DIVERGED
    return Exit.INTERRUPTED if result.interrupted else Exit.DONE


def profile_command(arguments: list[str]) -> int:
    """`jhpt profile`: the first argument, if it is no flag, names a preset or a YAML file."""
    base = with_family(load_config(source_of(arguments)), arguments)
    options, overrides = parse_overrides("jhpt profile", base, arguments, ProfileOptions)
    config = load_config(base, overrides)
    from jhpt.training.profiling import profile_command as measure

    return measure(config, out=options.out, cluster_out=options.cluster_out, quick=options.quick, again=options.again)


def doctor_command(arguments: list[str]) -> int:
    """`jhpt doctor`."""

    def doctor() -> None:
        """What this machine can do; every fallback is named."""

    tyro.cli(doctor, prog="jhpt doctor", args=arguments)
    from jhpt.measure.doctor import diagnose

    print(diagnose())
    return 0


def bench_command(arguments: list[str]) -> int:
    """`jhpt bench`."""

    def bench(
        name: Annotated[Benchmark, tyro.conf.Positional],
        /,
        quick: bool = False,
        json: str | None = None,
        only: str | None = None,
        out: str | None = None,
        published: str | None = None,
        trials: int | None = None,
        launches: int | None = None,
    ) -> int:
        """Measures, prints a table and keeps every raw sample.

        Args:
            name: which benchmark.
            quick: fewer trials with the same keys; ends within a minute.
            json: file for the samples and claims.
            only: for train, predict, memory, kernels, faults and hybrid: the parts to run, separated by commas.
                Default: all.
            out: for convergence and precision: folder of finished cells, which are not run again. Default: runs/NAME.
            trials: for faults: kills; other faults follow from it. Default: 300.
            launches: for hybrid and comms: how often the emulated hosts are launched anew. Default: 2, with --quick 1.
            published: for predict: CSV file of published runs, which are priced without a device instead.
        """
        of_cells = name in ("convergence", "precision")
        if out is not None and not of_cells:
            raise InputError(
                f"--out is the folder of finished cells of bench convergence and bench precision; bench {name} has "
                "none, leave it out"
            )
        if only is not None and name not in (with_parts := (*PACKAGED, "faults", "hybrid")):
            raise InputError(f"--only is for {one_of(with_parts)}; leave it out of bench {name}")
        if published is not None:
            return _bench_published(name, published, json, alone=not quick and only is None)
        if trials is not None and (name != "faults" or trials < 1):
            raise InputError("--trials is the number of kills of bench faults, at least 1; leave it out of the others")
        if launches is not None and (name not in ("hybrid", "comms") or launches < 1):
            raise InputError("--launches is how often bench hybrid and bench comms start their hosts, at least 1")
        options: dict[str, Any] = {"folder": out} if of_cells else {}
        if launches is not None:
            options["launches"] = launches
        if trials is not None:
            options["trials"] = trials
        if only is not None:
            options["only"] = only.split(",")
        return load(name).run(quick=quick, json_path=json, **options)

    return tyro.cli(bench, prog="jhpt bench", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))


def _bench_published(name: Benchmark, path: str, json_path: str | None, *, alone: bool) -> int:
    """`jhpt bench predict --published`.  alone: whether no other option selects what is run."""
    if name != "predict":
        raise InputError(f"--published is for bench predict; leave it out of bench {name}")
    if not alone:
        raise InputError("--published prices every run of the file at once; leave out --quick and --only")
    from jhpt.bench.published import run_published

    return run_published(path, json_path=json_path)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train_command,
    "plan": plan_command,
    "profile": profile_command,
    "tokenizer": tokenizer_command,
    "generate": generate_command,
    "eval": eval_command,
    "score": score_command,
    "launch": launch_command,
    "verify": verify_command,
    "bench": bench_command,
    "import": import_command,
    "export": export_command,
    "doctor": doctor_command,
}
