"""Files of recorded results: a JSON line each, with a name, a digest and the numbers by path."""

import json
from collections.abc import Iterable
from pathlib import Path

from flat import Flat, digest_of


def write_lines(path: Path, results: Iterable[tuple[str, Flat]]) -> int:
    """Writes each result as soon as it is there; returns how many there were."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for name, values in results:
            file.write(json.dumps({"name": name, "digest": digest_of(values), "values": values}) + "\n")
            file.flush()
            count += 1
    return count


def read_lines(path: Path) -> dict[str, Flat]:
    """The results by name; refuses a file that was changed by hand or cut off."""
    results: dict[str, Flat] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        record = json.loads(line)
        if digest_of(record["values"]) != record["digest"]:
            raise SystemExit(f"{path}, line {number}: the values are not those of the digest; record again")
        results[record["name"]] = record["values"]
    return results
