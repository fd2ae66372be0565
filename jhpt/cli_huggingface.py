"""`jhpt import hf DIR --out RUN` and `jhpt export hf RUN DIR`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from jhpt.core.amounts import parse_bytes

Kind = Annotated[Literal["hf"], tyro.conf.Positional]


def import_command(arguments: list[str]) -> int:
    """`jhpt import`."""

    def load(kind: Kind, folder: Annotated[Path, tyro.conf.Positional], /, out: Path) -> None:
        """Makes a run directory of a model in Hugging Face's layout (GPT-2, Llama, Mistral, Qwen2, BERT).

        Args:
            kind: hf.
            folder: with config.json and safetensors files.
            out: run directory, to be made; `jhpt train --init`, `generate`, `eval` and `export` read it.
        """
        from jhpt.interop.huggingface import import_folder

        import_folder(folder, out, print)

    tyro.cli(load, prog="jhpt import", args=arguments)
    return 0


def export_command(arguments: list[str]) -> int:
    """`jhpt export`."""

    def save(
        kind: Kind,
        run: Annotated[Path, tyro.conf.Positional],
        folder: Annotated[Path, tyro.conf.Positional],
        /,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        shard: str = "5GB",
    ) -> None:
        """Writes a run's newest weights in Hugging Face's layout.

        Args:
            kind: hf.
            run: run directory.
            folder: to be made; transformers' from_pretrained reads it.
            dtype: of the weights.
            shard: largest file.
        """
        from jhpt.interop.huggingface import export_run

        export_run(run, folder, print, dtype=dtype, shard_bytes=parse_bytes(shard))

    tyro.cli(save, prog="jhpt export", args=arguments)
    return 0
