"""Which of two words comes first, among distractors: BERT against a bag of words.

    python benchmarks/fine_tuning.py [--steps 600] [--examples 4000]

A text has `a` and `b` once each, at random places among 4 to 10 words of eight others, and its label says which comes
first.  How often each word occurs holds nothing of the label, so a classifier of counts (scikit-learn: CountVectorizer
and LogisticRegression) guesses.  BERT (2 layers, width 64) is trained on the labels from scratch, and after masked-LM
pre-training on the same texts.  Prints the accuracies on 1,000 held-out texts.  Needs scikit-learn.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

import jhpt

HELD_OUT = 1_000
MODEL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.d_model": 64,
    "model.num_heads": 4,
    "model.max_length": 32,
    "data.sequence_length": 32,
    "data.batch_size": 32,
    "optimizer.learning_rate": 1e-3,
    "log.tensorboard": False,
}


def texts(count: int, seed: int) -> list[dict[str, str]]:
    """Texts with labels."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        words, first = rng.choices("cdefghij", k=rng.randint(4, 10)), rng.random() < 0.5
        early, late = sorted(rng.sample(range(len(words) + 2), 2))
        words.insert(early, "a" if first else "b")
        words.insert(late, "b" if first else "a")
        rows.append({"text": " ".join(words), "label": "before" if first else "after"})
    return rows


def bag_of_words(train: list[dict[str, str]], held: list[dict[str, str]]) -> float:
    """Accuracy of logistic regression on counts of words."""
    model = make_pipeline(CountVectorizer(token_pattern=r"\w"), LogisticRegression())
    columns = lambda rows: ([row["text"] for row in rows], [row["label"] for row in rows])  # noqa: E731
    return float(model.fit(*columns(train)).score(*columns(held)))


def main() -> None:
    """Prints the accuracies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600, help="of fine-tuning, and of pre-training")
    parser.add_argument("--examples", type=int, default=4_000, help="to train on")
    options = parser.parse_args()
    train, held = texts(options.examples, seed=0), texts(HELD_OUT, seed=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, rows in (("train", train), ("held", held)):
            (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        steps = {"train.steps": options.steps, "evaluation.every": options.steps}
        data = {"data.path": str(folder / "train.jsonl"), "evaluation.batches": HELD_OUT}
        classify = {"model.task": "classify", "data.validation_path": str(folder / "held.jsonl")}
        scratch = jhpt.train("bert-tiny", out=folder / "scratch", overrides=MODEL | steps | data | classify)
        jhpt.train("bert-tiny", out=folder / "pretrained", overrides=MODEL | steps | data)
        overrides = MODEL | steps | data | classify
        tuned = jhpt.train("bert-tiny", init=folder / "pretrained", out=folder / "tuned", overrides=overrides)
    print(f"bag of words          {bag_of_words(train, held):.1%}")
    print(f"BERT from scratch     {scratch.validation_accuracy[options.steps]:.1%}")
    print(f"BERT, pre-trained     {tuned.validation_accuracy[options.steps]:.1%}")


if __name__ == "__main__":
    main()
