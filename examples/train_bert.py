"""Train a byte-level BERT by masked-language modelling on the source text of this Python's standard library.

    python examples/train_bert.py

On two CPU cores: about two minutes.  A guess has a loss of ln 256 = 5.55 nats per masked byte.
"""

import jhpt


def main() -> None:
    """Trains, and prints the last validation loss."""
    config = {
        "preset": "bert-tiny",
        "name": "example-bert",
        "train": {"steps": 1000},
        "evaluation": {"every": 250},
    }
    result = jhpt.train(config)
    step, loss = max(result.validation_losses.items())
    print(f"validation loss {loss:.3f} nats per masked byte after {step} steps; everything is in {result.run_dir}")


if __name__ == "__main__":
    main()
