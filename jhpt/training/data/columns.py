"""The rows of Parquet files and of Arrow streams, read a few at a time by pyarrow, which is optional."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from jhpt.core.errors import InputError
from jhpt.training.data.formats import format_of

BATCH_ROWS = 256
"""Rows of a Parquet file that are read at once."""

BUFFER = 1 << 20
"""Bytes of a column that are read at once, rather than those of a whole row group."""


def check_rows(file: Path, text_key: str) -> None:
    """Refuses a file of rows that has no text in column `text_key`.

    Raises:
      InputError: a damaged file, no rows, no such column, a column of something else.
    """
    with _opened(file) as (schema, batches):
        if text_key not in schema.names:
            raise InputError(
                f"data file {file} has no column {text_key!r} (found: {', '.join(schema.names)}); set data.text_key"
            )
        if not any(batch.num_rows for batch in batches((text_key,), 0, None)):
            raise InputError(f"data file {file} holds no rows; leave it out")
        kind = schema.field(text_key).type
        if str(kind) not in ("string", "large_string", "string_view"):
            raise InputError(f"column {text_key!r} of data file {file} holds {kind}, no text; set data.text_key")


def row_group_sizes(file: Path, text_key: str) -> list[int]:
    """Bytes of the text in every row group of a Parquet file that `check_rows` has accepted."""
    with _faults(file), import_module("pyarrow.parquet").ParquetFile(file) as table:
        groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
        columns = [[group.column(number) for number in range(group.num_columns)] for group in groups]
        return [
            sum(column.total_uncompressed_size for column in group if column.path_in_schema == text_key)
            for group in columns
        ]


def rows(file: Path, text_key: str, first: int = 0, last: int | None = None) -> Iterator[str]:
    """The texts of a file's rows, in order.

    Args:
      first, last: the row groups `first`, ..., `last - 1` of a Parquet file.

    Raises:
      InputError: a damaged file, a row without a text, a text that is not UTF-8.
    """
    number = 0
    with _opened(file) as (_, batches):
        for batch in batches((text_key,), first, last):
            for value in batch.column(text_key):
                number += 1
                try:
                    text = value.as_py()
                except UnicodeDecodeError:
                    raise InputError(f"{_row(file, first, number)} is not UTF-8; convert it or leave it out") from None
                if text is None:
                    raise InputError(
                        f"{_row(file, first, number)} has no text under {text_key!r} (null); leave out such rows"
                    )
                yield text


def _row(file: Path, first: int, number: int) -> str:
    """A row by its number in the file.  first, number: its row group's part, and its number there, from 1."""
    if first:
        with import_module("pyarrow.parquet").ParquetFile(file) as table:
            number += sum(table.metadata.row_group(group).num_rows for group in range(first))
    return f"data file {file}, row {number},"


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, Any]]:
    """(schema, function of (columns, first, last) -> record batches)."""
    arrow = import_module("pyarrow")
    with _faults(file):
        if format_of(file).layout == "arrow":
            # Not mapped into memory: pages that were read would count as this process's.
            with arrow.OSFile(str(file)) as source, import_module("pyarrow.ipc").open_stream(source) as stream:
                yield stream.schema, lambda columns, first, last: stream
        else:
            parquet = import_module("pyarrow.parquet")
            with parquet.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False) as table:

                def batches(columns: tuple[str, ...], first: int, last: int | None) -> Iterator[Any]:
                    groups = list(range(table.num_row_groups))[first:last]
                    return table.iter_batches(BATCH_ROWS, groups, list(columns), use_threads=False)

                yield table.schema_arrow, batches


@contextmanager
def _faults(file: Path) -> Iterator[None]:
    arrow = import_module("pyarrow")
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # names of columns are text, too
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"data file {file} is damaged or cut short ({reason}); copy or download it again") from None
