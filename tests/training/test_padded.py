"""`data.packing=pad`: loss and gradients are those of the documents by themselves, without padding, under any plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jhpt.core.families.family import masked_positions
from jhpt.models.context import text_lengths
from jhpt.models.family import Rows
from jhpt.models.layers import fold
from jhpt.models.masking import mask_tokens
from jhpt.models.objective import MASKS
from jhpt.training import setup as training_setup
from jhpt.training.data.tokenizer import ByteTokenizer
from jhpt.training.setup import prepare
from tests.covers import quick_and_exhaustive
from tests.sharding.plans import batch, by_path, compiled, laid_out, piped, random_params, spread, stored

BYTES = ByteTokenizer()
BATCH, LENGTH = 8, 32


@pytest.fixture(scope="session")
def short(tmp_path_factory):
    """Overrides that point at documents of 2 to 80 letters."""
    folder, rng = tmp_path_factory.mktemp("short"), np.random.default_rng(0)
    rows = ("".join(rng.choice(list("abcdefgh"), rng.integers(2, 80))) for _ in range(200))
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    data = {"data.path": str(folder / "a.jsonl"), "data.cache_dir": str(folder / "cache")}
    return data | {"data.packing": "pad", "data.validation_fraction": 0.0, "data.batch_size": BATCH}


def expected_of(setup, params, windows):
    """(gradients by path, loss per token): one row after the other, cut to its text."""
    model, masked = setup.model, setup.config.model.masked
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), jnp.arange(BATCH))
    last = BYTES.separator if masked else BYTES.end
    lengths = [row.tolist().index(last) + 1 if last in row else len(row) for row in windows]
    fraction = setup.config.data.mask_fraction
    chosen = mask_tokens(fold(keys, MASKS), jnp.asarray(windows), fraction, BYTES, jnp.asarray(lengths))
    chosen = jax.tree.map(np.asarray, chosen)

    def loss(params):
        total, count = 0.0, 0
        for row, length in enumerate(lengths):
            if masked:
                read = chosen.tokens[row, :length][None]
                counts = chosen.predicts[row]
                at, targets = chosen.positions[row][counts], chosen.targets[row][counts]
                assert len(at) == masked_positions(length, fraction) and (at < length - 1).all()
            else:
                read, targets = windows[row, : length - 1][None], windows[row, 1:length]
                at = np.arange(length - 1)
            logs = jax.nn.log_softmax(model.apply(params, read)[0, at])
            total, count = total - jnp.sum(logs[np.arange(len(at)), targets]), count + len(at)
        return total / count

    value, gradient = compiled(jax.value_and_grad(loss), params)
    return by_path(gradient), float(value), lengths


PLANS = {
    "one device": ("gpt", piped([3], 1, batch=BATCH)),
    "tensor": ("bert", piped([3], 1, tensor=2, data=2, sequence=True, batch=BATCH)),
    "pipe": ("bert", piped(spread(1, 2), 2, data=2, micro_batches=2, zero=1, batch=BATCH)),
    "pipe, gpt": ("gpt", piped(spread(1, 2), 2, data=2, micro_batches=4, zero=3, batch=BATCH)),
}


@pytest.mark.parametrize("plan", quick_and_exhaustive(PLANS, ["one device", "pipe"]))
def test_every_plan_computes_the_documents(tiny, short, monkeypatch, plan):
    monkeypatch.setattr(training_setup, "MOST_UNROLLED_LAYERS", 0)
    name, layout = PLANS[plan]
    setup = laid_out(prepare(tiny(f"{name}-tiny", **short | {"model.num_layers": 1})), layout)
    params, windows = random_params(setup), batch(setup, BATCH)

    def run(params, rows):
        gradient, sums = setup.training.gradients(params, rows, jax.random.key(7))
        return gradient, sums.nll / sums.tokens

    rows = Rows(jax.device_put(windows, setup.layout.batch))
    gradient, loss = compiled(run, stored(setup, params), rows)
    expected, expected_loss, lengths = expected_of(setup, params, windows)
    assert min(lengths) < 16 and max(lengths) >= LENGTH
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    actual = by_path(setup.layout.model_tree(gradient, setup.training.tied))
    for path, leaf in expected.items():
        assert np.abs(actual[path] - leaf).max() <= 2e-5 * max(np.abs(leaf).max(), 1e-30), path


def test_lengths_are_up_to_the_first_end():
    rows = jnp.array([[1, 2, 9, 9], [1, 9, 9, 9], [1, 2, 3, 9], [1, 2, 3, 4]])
    assert text_lengths(rows, 9).tolist() == [3, 2, 4, 4]


def test_masks_fall_on_text_only():
    """As many as an unpadded row of that length has; other positions keep their tokens."""
    lengths = jnp.arange(3, 33)
    tokens = jnp.broadcast_to(jnp.arange(32), (30, 32))
    found = mask_tokens(jax.random.split(jax.random.key(0), 30), tokens, 0.3, BYTES, lengths)
    for row, length in enumerate(range(3, 33)):
        chosen = np.asarray(found.positions[row])[np.asarray(found.predicts[row])]
        assert len(chosen) == masked_positions(length, 0.3) and chosen.min() > 0 and chosen.max() < length - 1
        changed = np.flatnonzero(np.asarray(found.tokens[row]) != np.arange(32))
        assert set(changed) <= set(chosen.tolist()) and (np.diff(found.positions[row]) > 0).all()
