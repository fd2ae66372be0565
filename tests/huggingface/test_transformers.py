"""Against the transformers library (extra `interop-test`)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jhpt
from jhpt.cli import main
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.gpt import GPTConfig
from jhpt.core.load import load_config
from jhpt.huggingface.architectures import exported
from jhpt.huggingface.folder import open_folder
from jhpt.interop.huggingface import export_run, import_folder
from jhpt.models.context import Context
from jhpt.models.family import build
from jhpt.models.vocabulary import token_nll
from jhpt.sharding.partition import path_name
from jhpt.training.data.cache import token_cache
from jhpt.training.data.tokenizer import ByteTokenizer
from jhpt.training.data.windows import causal_windows
from tests.huggingface.shapes import CLASSIFIER, LLAMA, MODELS, settings_of

pytestmark = pytest.mark.interop

LARGER = {
    "gpt2 4 x 128": GPTConfig(vocab_size=1000, num_layers=4, d_model=128, num_heads=4, max_length=128),
    "llama 4 x 128": GPTConfig(
        vocab_size=1000, num_layers=4, d_model=128, num_heads=8, num_kv_heads=2, d_ff=352, tied=False, **LLAMA
    ),
    "bert 6 x 384": BERTConfig(vocab_size=3000, num_layers=6, d_model=384, num_heads=12, max_length=128, dropout=0.0),
    "bert base": BERTConfig(vocab_size=30522, num_layers=12, d_model=768, num_heads=12, max_length=512, dropout=0.0),
}
SHAPES = {**MODELS, **LARGER}


@functools.cache
def theirs(name):
    """The model of the transformers library, with random weights of which none is zero or one."""
    import torch
    import transformers

    torch.manual_seed(0)
    _, tree = exported(SHAPES[name])
    config = transformers.AutoConfig.for_model(**tree)
    config._attn_implementation = "eager"
    kind = transformers.BertForPreTraining if tree["model_type"] == "bert" else transformers.AutoModelForCausalLM
    model = kind(config) if kind is transformers.BertForPreTraining else kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    @functools.cache
    def saved(name):
        path = tmp_path_factory.mktemp("model")
        theirs(name).save_pretrained(path, max_shard_size="1MB")
        return path

    return saved


def relative(ours, theirs):
    """|ours - theirs| / |theirs| over all numbers."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def tokens_of(model):
    length = min(model.max_length, 48)
    # Their BERT gives the embedding of token 0, the padding, no gradient.
    return np.random.default_rng(0).integers(1, model.vocab, (3, length))


def read(folder, name):
    """(our model, its parameters, the folder)."""
    source = open_folder(folder(name))
    model = build(source.model)
    return model, source.parameters(jax.eval_shape(model.init, jax.random.key(0))), source


def hidden_states(model, params, tokens):
    """The residual stream before every block and after the last."""
    xs = [model.embed(params, tokens)]
    for layer in range(model.config.num_layers):
        xs.append(model.block(jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"]), xs[-1]))
    return xs


@pytest.mark.parametrize("name", SHAPES)
def test_settings_are_those_of_the_model(folder, name):
    assert settings_of(open_folder(folder(name)).model) == settings_of(SHAPES[name])


@pytest.mark.parametrize("name", SHAPES)
def test_outputs(folder, name):
    """Hidden states of every layer and logits."""
    import torch

    model, params, _ = read(folder, name)
    tokens = tokens_of(model.config)
    with torch.no_grad():
        out = theirs(name)(torch.tensor(tokens), output_hidden_states=True)
    logits = out.prediction_logits if "bert" in name else out.logits
    xs = hidden_states(model, params, jnp.asarray(tokens))
    assert relative(model.logits(params, xs[-1])[..., : model.config.vocab], logits) < 1e-4
    # Of a causal model, the last of theirs is after the last norm.
    for ours, expected in zip(xs if "bert" in name else xs[:-1], out.hidden_states, strict=False):
        assert relative(ours, expected) < 1e-4


@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_gradients(folder, name):
    """Of every parameter, as the tensors that it is made of."""
    import torch

    model, params, source = read(folder, name)
    tokens = tokens_of(model.config)
    targets = tokens if "bert" in name else tokens[:, 1:]

    def loss(params):
        logits = model.apply(params, jnp.asarray(tokens))
        logits = logits if "bert" in name else logits[:, :-1]
        return jnp.mean(token_nll(logits, jnp.asarray(targets))[0])

    ours, grads = jax.value_and_grad(loss)(params)
    reference = theirs(name)
    reference.zero_grad()
    out = reference(torch.tensor(tokens))
    logits = out.prediction_logits if "bert" in name else out.logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())
    expected.backward()
    assert abs(float(ours) / expected.item() - 1) < 1e-4
    there = {key: parameter.grad for key, parameter in reference.named_parameters()}
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        part = source.parts[path_name(path)]
        for layer in range(model.config.num_layers if part.layered else 1):
            split = part.split(np.asarray(grad[layer] if part.layered else grad))
            for key, piece in zip(part.of_layer(layer), split, strict=True):
                if there[key] is None:  # the pooler has no part in this loss
                    assert not np.any(piece)
                    continue
                # Keys' biases have no gradient: the softmax does not change when all scores grow by the same.
                if np.linalg.norm(there[key]) > 1e-6:
                    assert relative(piece, there[key]) < 1e-4, key


def test_classes(tmp_path):
    """Their classifier, with padding and token types, and back."""
    import torch
    import transformers

    torch.manual_seed(0)
    _, tree = exported(CLASSIFIER)
    model = transformers.BertForSequenceClassification(transformers.AutoConfig.for_model(**tree)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "there")
    source = open_folder(tmp_path / "there")
    assert settings_of(source.model) == settings_of(CLASSIFIER) and not source.notes
    ours = build(source.model)
    params = source.parameters(jax.eval_shape(ours.init, jax.random.key(0)))
    tokens, lengths = tokens_of(source.model), np.array([24, 9, 13], np.int32)
    types = (np.arange(24) > 5).astype(np.int32) * np.ones((3, 1), np.int32)
    logits = ours.apply(params, jnp.asarray(tokens), context=Context(lengths=jnp.asarray(lengths), types=types))
    mask = torch.tensor(np.arange(24) < lengths[:, None])
    with torch.no_grad():
        expected = model(torch.tensor(tokens), attention_mask=mask, token_type_ids=torch.tensor(types)).logits
    assert relative(logits, expected) < 1e-4
    import_folder(tmp_path / "there", tmp_path / "run", print)
    export_run(tmp_path / "run", tmp_path / "again", print)
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "again")
    assert again.config.id2label == {0: "no", 1: "yes", 2: "maybe"}
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


PLAN = {
    "parallel.pipe": 2,
    "parallel.tensor": 2,
    "parallel.data": 2,
    "parallel.micro_batches": 2,
    "train.steps": 20,
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 5,
    "data.sequence_length": 16,
    "data.batch_size": 8,
    "evaluation.batches": 4,
    "evaluation.sample_tokens": 0,
    "log.tensorboard": False,
}
TRAINED = {
    "gpt2": MODELS["gpt2"].model_copy(update={"vocab_size": 256}),
    "llama": MODELS["llama"].model_copy(update={"vocab_size": 256}),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_trained_model_is_theirs_again(name, tmp_path, corpus):
    """Their weights, 20 steps on 2 stages x 2 data ranks x 2 tensor ranks, and back: the same held-out loss."""
    import torch
    import transformers

    torch.manual_seed(1)
    _, tree = exported(TRAINED[name])
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**tree))
    model.save_pretrained(tmp_path / "there")
    run = jhpt.train(None, init=tmp_path / "there", out=tmp_path / "run", overrides={**corpus, **PLAN})
    export_run(tmp_path / "run", tmp_path / "again", print)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    config = load_config(tmp_path / "run" / "config.yaml")
    windows = causal_windows(token_cache(config.data, ByteTokenizer()).validation, 16, "held-out")
    rows = torch.tensor(np.stack([windows[row] for row in range(min(len(windows), 4 * 8))]), dtype=torch.long)
    with torch.no_grad():
        logits = again(rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert abs(run.validation_losses[20] / loss - 1) < 1e-4
    assert loss < 5.3  # it was ln(256) = 5.55


@pytest.mark.parametrize("name", [*MODELS, "bert 6 x 384"])
def test_exported_weights_are_read_back_bit_for_bit(name, folder, tmp_path):
    """Theirs -> a run -> `from_pretrained`."""
    import torch

    import_folder(folder(name), tmp_path / "run", print)
    export_run(tmp_path / "run", tmp_path / "again", print, shard_bytes=1e6)
    again = type(theirs(name)).from_pretrained(tmp_path / "again")
    found = again.state_dict()
    for key, value in theirs(name).state_dict().items():
        if not key.startswith("cls.seq_relationship"):  # has no place in ours
            assert torch.equal(found[key], value), key


LONG = {name: shape.model_copy(update={"vocab_size": 300, "max_length": 128}) for name, shape in MODELS.items()}
CAUSAL = [name for name in LONG if name != "bert"]
SHAPES |= {f"long {name}": shape for name, shape in LONG.items()}


@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_text_is_theirs(name, folder):
    """64 tokens behind two prompts of different lengths, token for token."""
    import torch

    prompts = ["def ", "the mesh maps every layer"]
    ours = jhpt.load(folder(f"long {name}"), tokenizer="bytes").generate(prompts, tokens=64, temperature=0.0)
    for prompt, row in zip(prompts, ours, strict=True):
        ids = torch.tensor([list(prompt.encode())])
        settings = dict(max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected = theirs(f"long {name}").generate(ids, attention_mask=torch.ones_like(ids), **settings)
        stop = row.tokens.index(255) if 255 in row.tokens else 64  # the end of a document ends ours
        assert list(row.tokens)[:stop] == expected[0, len(prompt) :].tolist()[:stop]
        assert len(row.tokens) == 64 or row.finish == "stop"


@pytest.mark.parametrize("name", LONG)
def test_scores_are_theirs(name, folder, tmp_path):
    """`jhpt score` of a folder."""
    import torch

    tokens = tokens_of(LONG[name])
    np.save(tmp_path / "tokens.npy", tokens)
    files = ["--tokens", str(tmp_path / "tokens.npy"), "--out", str(tmp_path / "logits.npy")]
    assert main(["score", str(folder(f"long {name}")), *files]) == 0
    with torch.no_grad():
        out = theirs(f"long {name}")(torch.tensor(tokens))
    logits = out.prediction_logits if name == "bert" else out.logits
    assert relative(np.load(tmp_path / "logits.npy"), logits) < 1e-4
