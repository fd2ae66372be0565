"""BERT (`BertForMaskedLM`, `BertForPreTraining`, `BertModel`, `BertForSequenceClassification`)."""

from typing import Any

from jhpt.core.errors import InputError
from jhpt.core.families.bert import BERTConfig
from jhpt.core.families.text import TextConfig
from jhpt.huggingface.settings import Settings
from jhpt.huggingface.tensors import Heads, Part, layer_norm, linear, same, separate_qkv, table

BLOCK = "bert.encoder.layer.{}"

CLASSIFIER = "BertForSequenceClassification"


def settings(there: Settings) -> TextConfig:
    """`config.json` -> the model, without dropout of attention probabilities, which fused kernels do not offer."""
    there.only(hidden_act="gelu", position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    there.only(tie_word_embeddings=True)
    return BERTConfig(
        **_classes(there),
        vocab_size=there.number("vocab_size", 30522),
        num_layers=there.number("num_hidden_layers", 12),
        d_model=there.number("hidden_size", 768),
        num_heads=there.number("num_attention_heads", 12),
        d_ff=there.number("intermediate_size", 3072),
        max_length=there.number("max_position_embeddings", 512),
        type_vocab_size=there.number("type_vocab_size", 2),
        dropout=there.get("hidden_dropout_prob", 0.1),
        norm_eps=there.positive("layer_norm_eps", 1e-12),
    )


def _classes(there: Settings) -> dict[str, Any]:
    """Of a classifier: the task and its classes, which have names in the order of their numbers."""
    if there.get("architectures") != [CLASSIFIER]:
        return {}
    there.only(problem_type="single_label_classification")
    names = there.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}  # what the library leaves out
    if not isinstance(names, dict) or set(names) != {str(number) for number in range(len(names))} or len(names) < 2:
        raise InputError(f"{there.place}: id2label={names!r} does not name two or more classes from 0 on; repair it")
    classes = [str(names[str(number)]) for number in range(len(names))]
    return {"task": "classify", "num_classes": len(classes), "class_names": classes}


def config(model: BERTConfig) -> dict[str, Any]:
    """The inverse of `settings`."""
    tree = {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": model.vocab,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn_width,
        "max_position_embeddings": model.max_length,
        "type_vocab_size": model.type_vocab_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": model.norm_eps,
    }
    if model.pairs:
        return tree | {"architectures": ["BertForPreTraining"]}
    if not model.classifies:
        return tree
    names = model.class_names or tuple(f"LABEL_{number}" for number in range(model.classes))
    return tree | {
        "architectures": [CLASSIFIER],
        "problem_type": "single_label_classification",
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "classifier_dropout": model.dropout,
    }


def parts(model: BERTConfig) -> tuple[Part, ...]:
    """The parameters and their tensors.  `BertModel` has no masked-LM head, and `BertForMaskedLM` no pooler."""
    head = _classifier() if model.classifies else _masked_lm(model)
    return (*_encoder(model), *head)


def _classifier() -> tuple[Part, ...]:
    return (*linear("pooler", "bert.pooler.dense"), *linear("head/classifier", "classifier"))


def _masked_lm(model: BERTConfig) -> tuple[Part, ...]:
    predictions = "cls.predictions"
    return (
        *linear("head/transform", f"{predictions}.transform.dense", fresh=True),
        *layer_norm("head/norm", f"{predictions}.transform.LayerNorm", fresh=True),
        table("head/bias", f"{predictions}.bias", model.vocab, model.padded_vocab, fresh=True),
        *linear("pooler", "bert.pooler.dense", fresh=True),
        *(linear("head/pair", "cls.seq_relationship", fresh=True) if model.pairs else ()),
    )


def _encoder(model: BERTConfig) -> tuple[Part, ...]:
    rows, padded = model.vocab, model.padded_vocab
    heads = Heads(kv=model.num_heads, group=1, width=model.head_dim)
    attention = f"{BLOCK}.attention"
    queries, keys, values = (f"{attention}.self.{name}" for name in ("query", "key", "value"))
    return (
        table("embedding/tokens", "bert.embeddings.word_embeddings.weight", rows, padded),
        same("embedding/positions", "bert.embeddings.position_embeddings.weight"),
        same("embedding/types", "bert.embeddings.token_type_embeddings.weight"),
        *layer_norm("embedding/norm", "bert.embeddings.LayerNorm"),
        *separate_qkv(heads, (queries, keys, values), bias=True),
        *linear("blocks/attention/projection", f"{attention}.output.dense"),
        *layer_norm("blocks/attention_norm", f"{attention}.output.LayerNorm"),
        *linear("blocks/mlp/up", f"{BLOCK}.intermediate.dense"),
        *linear("blocks/mlp/down", f"{BLOCK}.output.dense"),
        *layer_norm("blocks/mlp_norm", f"{BLOCK}.output.LayerNorm"),
    )
