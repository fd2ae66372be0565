"""Train a byte-level GPT on the source text of this Python's standard library.

    python examples/train_gpt.py

On two CPU cores: about three minutes.  A guess has a loss of ln 256 = 5.55 nats per byte.
"""

import jhpt


def main() -> None:
    """Trains, and prints the last validation loss."""
    config = {
        "preset": "gpt-tiny",
        "name": "example-gpt",
        "train": {"steps": 800},
        "evaluation": {"every": 200, "prompt": "import "},
    }
    result = jhpt.train(config)
    step, loss = max(result.validation_losses.items())
    print(f"validation loss {loss:.3f} nats per byte after {step} steps; everything is in {result.run_dir}")


if __name__ == "__main__":
    main()
