"""A process that tokenises: `python -m jhpt.training.data.worker`, started by `workers`.  It imports no jax.

Lines of JSON come in: first the job, then shards.  For each shard that is written a line goes out, empty or with what
is wrong.  The process ends with its standard input, so it does not outlive the one that started it, however that ends.
"""

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from jhpt.core.errors import InputError
from jhpt.training.data.documents import Part
from jhpt.training.data.shards import BATCH_CHARS_ALONE, write_shard
from jhpt.training.data.tokenizer import load_tokenizer


def main() -> None:
    """Reads the job, then writes one shard after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one ends the others
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    shards: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_receive, args=(shards,), daemon=True).start()
    tokenizer, dtype = load_tokenizer(job["tokenizer"]), np.dtype(job["dtype"])
    while True:
        shard = shards.get()
        answer = {}
        try:
            if tokenizer.fingerprint != job["fingerprint"]:
                raise InputError(f"data.tokenizer={job['tokenizer']} has changed since the run began; start it again")
            parts = [Part(file=Path(part["file"]), first=part["first"], last=part["last"]) for part in shard["parts"]]
            write_shard(Path(shard["path"]), parts, job["text_key"], tokenizer, dtype, BATCH_CHARS_ALONE)
        except InputError as error:
            answer = {"refused": str(error)}
        except OSError as error:
            answer = {"failed": str(error)}
        except Exception:
            answer = {"crashed": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


def _receive(shards: SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        shards.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
