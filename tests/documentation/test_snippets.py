"""Blocks of Python run, YAML is a configuration, and the settings and presets that pages name exist."""

import re
from pathlib import Path

import pytest

from jhpt.core.cluster_file import read_cluster
from jhpt.core.load import dotted, load_config
from jhpt.core.presets import PRESETS
from tests.documentation.extraction import blocks, inline, pages

PYTHON = [block for block in blocks() if block.language == "python"]
YAML = [block for block in blocks() if block.language == "yaml"]


@pytest.mark.parametrize("block", PYTHON, ids=[block.place for block in PYTHON])
def test_a_block_of_python_runs(block, workplace, small, capsys):
    exec(compile(block.text, block.place, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


@pytest.mark.parametrize("block", YAML, ids=[block.place for block in YAML])
def test_a_block_of_yaml_is_a_configuration_or_a_cluster(block, tmp_path):
    file = tmp_path / "any.yaml"
    file.write_text(block.text)
    if "\nnodes:" in block.text:
        assert read_cluster(file).num_devices > 1
    else:
        load_config(file)


def test_a_file_lists_what_differs_from_its_preset(workplace):
    mine, preset = load_config("my.yaml"), load_config("gpt2-124m")
    assert mine.model == preset.model
    assert (mine.data.batch_size, mine.parallel.tensor) == (64, 2)
    assert Path(mine.data.tokenizer).name == "tokenizer.json"


def test_settings_that_pages_name_exist():
    configs = [load_config(name) for name in ("gpt-tiny", "bert-tiny", "vgg16-tiny")]
    values = {name for config in configs for name in dotted(config.model_dump(mode="json"))}
    names = values | {name.rpartition(".")[0] for name in values}
    sections = {name.partition(".")[0] for name in values if "." in name}
    for piece in inline():
        if match := re.fullmatch(r"(\w+\.[\w.]+)(=.*|: .*)?", piece.text):
            name = match[1]
            if name.partition(".")[0] in sections and not name.endswith((".py", ".json", ".yaml", ".safetensors")):
                assert name in names, f"{piece.place}: there is no setting {name}"


def test_the_readme_lists_every_preset():
    (listed,) = re.findall(r"Presets:\n(.*?)\.\n\n", pages()["README.md"], re.DOTALL)
    assert re.findall(r"`([^`]+)`", listed) == list(PRESETS)
