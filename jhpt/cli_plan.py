"""`jhpt plan`."""

import gc
import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from jhpt.core.config import Config
from jhpt.core.divisors import one_of
from jhpt.core.errors import InputError
from jhpt.core.files import check_writable
from jhpt.core.likely_mistakes import likely_mistakes
from jhpt.core.load import load_config
from jhpt.flags import PlanOptions, parse_overrides, source_of, value_of, with_family, with_words

if TYPE_CHECKING:
    from jhpt.compiled.comparison import Comparison
    from jhpt.planner.api import Options
    from jhpt.planner.search.solve import Answer


MOST_COMPARED = 64
"""Clusters that are compared at a time, each by a search of a second or more."""


def plan_command(arguments: list[str]) -> int:
    """`jhpt plan`: the first argument, if it is no flag, names a preset, a YAML file or a network."""
    from jhpt.planner.api import network_of

    # What was imported lives to the end, so the collector need not visit it in every pass of the search.
    gc.freeze()
    source = source_of(arguments)
    # A network and a profile alone have no settings.
    alone = network_of(source) is not None or (source is None and value_of("--profile", arguments) is not None)
    base = None if alone else with_words(with_family(load_config(source), arguments), arguments)
    options, overrides = parse_overrides("jhpt plan", base, arguments, PlanOptions)
    if options.list_clusters:
        return _list_clusters(source, options, overrides)
    for name in filter(_decided_by_planner, overrides):
        print(f"note: jhpt plan decides {name} itself, so --{name} is not used", file=sys.stderr)
    config = None if base is None else load_config(base, overrides)
    for line in likely_mistakes(config) if config else ():
        print(f"warning: {line}", file=sys.stderr)
    if config is not None and config.data.tokenizer != "bytes" and config.model.vocab_size == "auto":
        print(
            f"note: planned with the {config.model.vocab:,} token ids that {config.name} is made for, whatever "
            "data.tokenizer has; model.vocab_size sets another number",
            file=sys.stderr,
        )
    if options.clusters is not None:
        return _compare(config or source, options)
    for flag, path in (("--out", options.out), ("--svg", options.svg)):
        check_writable(flag, path)
    if options.compile:
        _check_compilable(source, config, options)
    return _answer(source, config, options)


def _answer(source: str | None, config: Config | None, options: PlanOptions) -> int:
    """Plans for one cluster."""
    from jhpt.planner.api import prepare
    from jhpt.planner.report.answer import make_console, print_answer, timeline, to_json
    from jhpt.planner.report.rent import check_tokens, read_prices, read_tokens, rent
    from jhpt.planner.report.timeline import svg_timeline
    from jhpt.planner.search.baselines import baselines

    asked: Options = {**_question(options), "cluster": options.cluster}
    task = prepare(config or source, **asked)
    tokens, prices = read_tokens(options.tokens), read_prices(options.price, [task.cluster])
    check_tokens(task.profile, tokens, prices)
    answer = task.solve()
    compared, paid = baselines(task.request, answer.model), rent(answer, tokens, prices)
    compiled = _compiled(config, answer) if options.compile and config else None
    if options.out:
        answer.plan.save(options.out)
    if options.svg:
        title = f"{answer.plan.model} on {answer.plan.cluster}"
        Path(options.svg).write_text(svg_timeline(timeline(answer), title), encoding="utf-8")
    if options.json:
        tree = to_json(answer, compared, paid) | ({"compiled": compiled.to_json()} if compiled else {})
        print(json.dumps(tree, indent=1))
    else:
        print_answer(make_console(), answer, compared, paid)
        if compiled:
            compiled.print(make_console())
    return 0


def _question(options: PlanOptions) -> "Options":
    """The arguments of `jhpt.plan` beside the cluster."""
    return {
        "profile": options.profile,
        "batch": options.batch,
        "micro_batches": options.micro_batches,
        "space": options.space,
        "schedule": options.schedule,
        "budget": options.budget,
    }


def _compare(source: Config | str | None, options: PlanOptions) -> int:
    """Plans for several clusters, and compares them."""
    from jhpt.core.cluster_file import find_cluster
    from jhpt.planner.api import compare
    from jhpt.planner.report.answer import make_console
    from jhpt.planner.report.clusters import options_json, print_options, ranked
    from jhpt.planner.report.rent import read_prices, read_tokens

    for flag in ("cluster", "out", "svg", "compile"):
        if getattr(options, flag):
            raise InputError(f"--{flag} is for one cluster, and --clusters compares several; leave one of them out")
    names = [name.strip() for name in str(options.clusters).split(",")]
    if len(set(names)) < max(2, len(names)):
        raise InputError(f"--clusters {options.clusters}: name two or more, each once, as in h100x8x1,a100x8x2")
    if len(names) > MOST_COMPARED:
        raise InputError(f"--clusters names {len(names)} clusters, and up to {MOST_COMPARED} are compared at a time")
    clusters = [find_cluster(name) for name in names]
    devices = {node.device.name for cluster in clusters for node in cluster.nodes}
    if options.profile and len(devices) > 1:
        raise InputError(
            f"--profile {options.profile} holds for one kind of device, and --clusters has {one_of(sorted(devices))}; "
            "leave --profile out, or compare clusters of one kind"
        )
    tokens, prices = read_tokens(options.tokens), read_prices(options.price, clusters)
    found = ranked(compare(source, clusters, **_question(options)), tokens, prices)
    if options.json:
        print(json.dumps(options_json(found), indent=1))
    else:
        print_options(make_console(), found)
    return 0


def _list_clusters(source: str | None, options: PlanOptions, overrides: Mapping[str, object]) -> int:
    """Prints the catalogue."""
    from jhpt.planner.report.answer import make_console
    from jhpt.planner.report.clusters import catalogue_json, print_catalogue

    given = [field.name for field in fields(options) if getattr(options, field.name) != field.default]
    others = [f"--{name.replace('_', '-')}" for name in given if name not in ("list_clusters", "json")]
    others += [*([source] if source else []), *(f"--{name}" for name in overrides)]
    if others:
        raise InputError(f"--list-clusters plans nothing, so it takes only --json; leave out {' and '.join(others)}")
    if options.json:
        print(json.dumps(catalogue_json(), indent=1))
    else:
        print_catalogue(make_console())
    return 0


def _decided_by_planner(setting: str) -> bool:
    """Whether a setting is a choice of the plan, and not one that limits the planner's choices."""
    read = ("parallel.auto", "parallel.compression", "parallel.gradient_compression")
    return setting.startswith("parallel.") and not setting.startswith(read)


def _check_compilable(source: str | None, config: Config | None, options: PlanOptions) -> None:
    """Refuses --compile before any planning if there is no program to compile."""
    if config is None:
        problem = f"{source} is a table of layers" if source else "a profile alone has no program"
        raise InputError(f"--compile: {problem}; name a GPT or BERT preset or a YAML file, or leave out --compile")
    if options.space != "spmd":
        raise InputError(
            f"--compile: plans of space={options.space} are not run by one program, so there is none to compile; "
            "use --space spmd or leave out --compile"
        )


def _compiled(config: Config, answer: "Answer") -> "Comparison":
    """The plan's real step, compiled for its cluster, compared with the plan's estimate."""
    from jhpt.compiled.quiet import quiet

    with quiet():  # jax loads CUDA's libraries if they are installed
        from jhpt.compiled.comparison import compare
        from jhpt.training.compile import compiled_step

    reading = compiled_step(config, answer.plan, answer.model.cluster)
    return compare(reading, answer.plan, answer.estimate, answer.model.profile)
