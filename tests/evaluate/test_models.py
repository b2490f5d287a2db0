"""What a name can be, what opens, and what is refused with a reason and without running anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import tensors, write_gguf
from tiny_models import (
    SENTENCES,
    VOCABULARY,
    edit_json,
    save_llama,
    save_tokenizer,
    tiny_run,
    train_backend,
    write_corpus,
)

from gatelab.data.settings import BigramBackcopySettings, DataSettings
from gatelab.evaluate import memory
from gatelab.evaluate.models import OpenedModel, open_model
from gatelab.evaluate.texts import file_text, read_windows
from gatelab.interop.probe import attach_hugging_face
from gatelab.model.decoder import Decoder
from gatelab.train.checkpoint import checkpoints, load_decoder
from gatelab.train.loop import train

AUTO_MAP = {"AutoConfig": "configuration_evil.Model", "AutoModelForCausalLM": "modeling_evil.Model"}


def logits_of(opened: OpenedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        output = opened.model(torch.tensor([ids]))
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.fixture
def copied_llama(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "llama"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file."""
    for package in ("transformers", "gguf", "accelerate"):
        pytest.importorskip(package)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


class TestRuns:
    def test_the_newest_checkpoint(self, run: Path) -> None:
        opened = open_model(str(run))
        newest = checkpoints(run / "checkpoints")[-1]
        expected = load_decoder(newest)
        assert isinstance(opened.model, Decoder) and not opened.model.training
        assert opened.model.state_dict().keys() == expected.state_dict().keys()
        assert all(
            torch.equal(opened.model.state_dict()[name], tensor) for name, tensor in expected.state_dict().items()
        )
        assert (opened.name, opened.family, opened.step, opened.max_context) == (str(run), "gatelab", 2, 131)
        assert opened.attach is None
        assert opened.description["origin"] == "GateLab run folder" and opened.description["dtype"] == "float32"
        assert opened.description["parameters"] == sum(weight.numel() for weight in expected.parameters())

    def test_the_tokenizer_that_it_was_trained_with(self, run: Path) -> None:
        tokenizer = open_model(str(run)).tokenizer
        text = SENTENCES[3] + "<|bos|>"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert (tokenizer.bos_id, tokenizer.adds_bos, tokenizer.decode_one(0)) == (0, False, "<|bos|>")
        assert 0 not in tokenizer.encode(text) and tokenizer.vocab_size <= VOCABULARY

    def test_in_another_dtype(self, run: Path) -> None:
        opened = open_model(str(run), torch.bfloat16)
        assert logits_of(opened, [0, 1, 2]).dtype == torch.bfloat16 and opened.description["dtype"] == "bfloat16"

    def test_it_can_be_moved_away_from_its_data(self, run: Path, tmp_path: Path) -> None:
        moved = Path(shutil.copytree(run, tmp_path / "moved"))
        assert open_model(str(moved)).tokenizer.encode(SENTENCES[0]) == open_model(str(run)).tokenizer.encode(
            SENTENCES[0]
        )

    def test_without_its_tokenizer(self, run: Path, tmp_path: Path) -> None:
        moved = Path(shutil.copytree(run, tmp_path / "moved"))
        (moved / "tokenizer.json").unlink()
        with pytest.raises(
            ValueError, match=r"has no tokenizer.json; copy it there from the folder of its prepared data"
        ):
            open_model(str(moved))

    def test_without_a_checkpoint(self, run: Path, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        shutil.copy(run / "settings.yaml", tmp_path / "run")
        with pytest.raises(ValueError, match="has no checkpoint yet; train it until it has saved one"):
            open_model(str(tmp_path / "run"))

    def test_a_damaged_checkpoint(self, run: Path, tmp_path: Path) -> None:
        moved = Path(shutil.copytree(run, tmp_path / "moved"))
        weights = checkpoints(moved / "checkpoints")[-1] / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
            open_model(str(moved))

    def test_a_synthetic_task_has_no_tokenizer(self, tmp_path: Path) -> None:
        settings = tiny_run(write_corpus(tmp_path / "corpus.jsonl"))
        task = DataSettings(synthetic=BigramBackcopySettings(vocab_size=29), context=19)
        train(settings.model_copy(update={"data": task}), tmp_path / "run", tmp_path / "cache")
        assert not (tmp_path / "run" / "tokenizer.json").exists()
        with pytest.raises(ValueError, match="trained on a synthetic task and has no tokenizer for a text"):
            open_model(str(tmp_path / "run"))

    def test_one_that_does_not_fit(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
        with pytest.raises(
            ValueError, match=r"loading the run in .* needs about 0.00 GB of memory and 0.00 GB are free"
        ):
            open_model(str(run))


class TestHuggingFaceFolders:
    def test_it_is_what_transformers_loads(self, llama: Path) -> None:
        from transformers import LlamaForCausalLM

        opened = open_model(str(llama))
        assert (opened.family, opened.max_context, opened.step, opened.attach) == (
            "llama",
            97,
            None,
            attach_hugging_face,
        )
        assert not opened.model.training and opened.model.config.use_cache is False
        ids = opened.tokenizer.encode(SENTENCES[0])
        with torch.no_grad():
            expected = LlamaForCausalLM.from_pretrained(llama)(torch.tensor([ids])).logits
        torch.testing.assert_close(logits_of(opened, ids), expected)
        assert opened.description["origin"] == "Hugging Face folder"
        assert opened.description["transformers"] and opened.description["class"] == "LlamaForCausalLM"

    def test_in_another_dtype(self, llama: Path) -> None:
        opened = open_model(str(llama), torch.bfloat16)
        assert {weight.dtype for weight in opened.model.parameters()} == {torch.bfloat16}

    def test_qwen3(self, tmp_path: Path) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
        config = Qwen3Config(vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, **sizes)
        Qwen3ForCausalLM(config).save_pretrained(tmp_path)
        save_tokenizer(tmp_path, bos=None)
        opened = open_model(str(tmp_path))
        assert opened.family == "qwen3" and opened.tokenizer.bos_id is None and not opened.tokenizer.adds_bos

    @pytest.mark.parametrize("times", [0, 1, 2])
    def test_bos_is_counted_and_used_once(self, tmp_path: Path, text: Path, times: int) -> None:
        save_tokenizer(save_llama(tmp_path), times_added=times)
        tokenizer = open_model(str(tmp_path)).tokenizer
        assert (tokenizer.bos_id, tokenizer.num_bos_added, tokenizer.adds_bos) == (0, times, times > 0)
        backend = train_backend()
        backend.encode_special_tokens = True
        assert tokenizer.encode("<s>The sink") == backend.encode("<s>The sink", add_special_tokens=False).ids
        assert 0 not in tokenizer.encode("<s>The sink") and tokenizer.decode_one(0) == "<s>"
        windows = read_windows(file_text(text), tokenizer, tmp_path, length=70)
        assert int((windows.tokens == 0).sum()) == 1 and windows.tokens[0, 0] == 0

    def test_without_a_tokenizer(self, tmp_path: Path) -> None:
        save_llama(tmp_path)
        with pytest.raises(ValueError, match="its tokenizer can't be read, without which no text can be measured"):
            open_model(str(tmp_path))

    def test_without_weights(self, copied_llama: Path) -> None:
        (copied_llama / "model.safetensors").unlink()
        with pytest.raises(ValueError, match="can't be opened: its weights can't be loaded"):
            open_model(str(copied_llama))

    def test_with_a_part_of_its_weights(self, copied_llama: Path) -> None:
        """transformers would fill them in at random."""
        from safetensors.torch import load_file, save_file

        weights = load_file(copied_llama / "model.safetensors")
        del weights["model.layers.1.self_attn.q_proj.weight"]
        save_file(weights, copied_llama / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"lacks 1 of the model's weights, model.layers.1.self_attn.q_proj.weight"):
            open_model(str(copied_llama))

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": "llama", "hidden_size": "wide"}', "{}"])
    def test_a_damaged_configuration(self, copied_llama: Path, content: str) -> None:
        (copied_llama / "config.json").write_text(content)
        with pytest.raises(ValueError, match="can't be opened: its configuration") as error:
            open_model(str(copied_llama))
        assert "\n" not in str(error.value)

    def test_one_without_softmax_attention(self, tmp_path: Path) -> None:
        from transformers import MambaConfig

        MambaConfig(vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"has no softmax attention \(family 'mamba'\)"):
            open_model(str(tmp_path))

    def test_one_that_does_not_fit(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import transformers

        def refuse(*arguments: Any, **options: Any) -> None:
            raise AssertionError("no weight may be read")

        monkeypatch.setattr(memory, "available_bytes", lambda: 50_000)
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
        message = r"needs about 0.00 GB of memory and 0.00 GB are free; take a smaller model, or dtype bfloat16"
        with pytest.raises(ValueError, match=message):
            open_model(str(llama))

    def test_an_encoder(self, tmp_path: Path) -> None:
        from transformers import ViTConfig

        ViTConfig().save_pretrained(tmp_path)
        save_tokenizer(tmp_path)
        with pytest.raises(ValueError, match="its configuration does not describe a decoder"):
            open_model(str(tmp_path))


class TestForeignCode:
    """Each folder holds code that leaves a mark when it runs."""

    @pytest.fixture
    def hostile(self, copied_llama: Path) -> Path:
        mark = f"import pathlib\npathlib.Path({str(copied_llama / 'MARK')!r}).touch()\nclass Model: pass\n"
        for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "setup.py", "__init__.py"):
            (copied_llama / name).write_text(mark)
        return copied_llama

    def test_a_family_that_needs_it_is_refused(self, hostile: Path) -> None:
        edit_json(hostile / "config.json", model_type="evil", auto_map=AUTO_MAP)
        message = (
            r"needs code of its own \(modeling_evil.Model\), because transformers .* does not know the family 'evil'"
        )
        with pytest.raises(ValueError, match=message):
            open_model(str(hostile))
        assert not (hostile / "MARK").exists()

    @pytest.mark.parametrize("auto_map", ["modeling_evil.Model", ["configuration_evil.Model"], {"AutoModel": 3}])
    def test_whatever_its_map_is(self, hostile: Path, auto_map: Any) -> None:
        edit_json(hostile / "config.json", model_type="evil", auto_map=auto_map)
        with pytest.raises(ValueError, match="GateLab never runs code that comes with a model"):
            open_model(str(hostile))
        assert not (hostile / "MARK").exists()

    def test_a_known_family_uses_the_code_of_transformers(self, hostile: Path) -> None:
        edit_json(hostile / "config.json", auto_map=AUTO_MAP)
        edit_json(hostile / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_evil.Model"]})
        opened = open_model(str(hostile))
        assert opened.description["class"] == "LlamaForCausalLM" and not (hostile / "MARK").exists()

    def test_a_tokenizer_with_code_alone(self, hostile: Path) -> None:
        (hostile / "tokenizer.json").unlink()
        config = {"auto_map": {"AutoTokenizer": ["tokenization_evil.Model", None]}, "tokenizer_class": "EvilTokenizer"}
        edit_json(hostile / "tokenizer_config.json", **config)
        with pytest.raises(ValueError, match="its tokenizer can't be read"):
            open_model(str(hostile))
        assert not (hostile / "MARK").exists()

    @pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation_internal", "_experts_implementation"])
    @pytest.mark.parametrize("value", ["owner/kernel", {"": "owner/kernel:run"}])
    def test_kernels_of_a_repository(self, hostile: Path, key: str, value: Any) -> None:
        edit_json(hostile / "config.json", **{key: value})
        message = f"asks with {key} for code from the repository 'owner/kernel.*'; GateLab never runs code"
        with pytest.raises(ValueError, match=message):
            open_model(str(hostile))

    def test_kernels_asked_for_by_a_part(self, hostile: Path) -> None:
        edit_json(hostile / "config.json", text_config={"attn_implementation": "owner/kernel"})
        with pytest.raises(ValueError, match="for code from the repository 'owner/kernel'"):
            open_model(str(hostile))

    def test_an_implementation_by_name_is_not_taken_from_the_file(self, hostile: Path) -> None:
        edit_json(hostile / "config.json", attn_implementation="flash_attention_2")
        assert open_model(str(hostile)).model.config._attn_implementation == "sdpa"

    def test_weights_as_a_pickle_run_nothing(self, hostile: Path) -> None:
        import pickle

        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return Path.touch, (hostile / "MARK",)

        (hostile / "model.safetensors").unlink()
        (hostile / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
        with pytest.raises(ValueError, match="its weights can't be loaded"):
            open_model(str(hostile))
        assert not (hostile / "MARK").exists()


class TestGGUF:
    def test_file_or_folder(self, file: Path) -> None:
        for name in (str(file), str(file.parent)):
            opened = open_model(name)
            assert (opened.name, opened.family, opened.max_context) == (name, "llama", 97)
            assert opened.description["origin"] == "GGUF file" and opened.attach is attach_hugging_face
            assert {weight.dtype for weight in opened.model.parameters()} == {torch.float32}
            embedding = torch.from_numpy(tensors()["token_embd.weight"])
            assert torch.equal(opened.model.get_input_embeddings().weight, embedding)

    def test_its_tokenizer(self, file: Path) -> None:
        tokenizer = open_model(str(file)).tokenizer
        assert tokenizer.bos_id == 0 and tokenizer.decode_one(0) == "<s>"
        expected = train_backend().encode(SENTENCES[0], add_special_tokens=False).ids
        assert tokenizer.encode(SENTENCES[0]) == expected

    def test_one_that_does_not_fit(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "available_bytes", lambda: 50_000)
        with pytest.raises(ValueError, match=r"loading .*tiny.gguf needs about 0.00 GB"):
            open_model(str(file))

    def test_an_unknown_architecture(self, tmp_path: Path, file: Path) -> None:
        with pytest.raises(ValueError, match=r"new\.gguf can't be opened: its configuration can't be read"):
            open_model(str(write_gguf(tmp_path / "new.gguf", architecture="unheard_of")))

    def test_a_damaged_file(self, tmp_path: Path, file: Path) -> None:
        (tmp_path / "half.gguf").write_bytes(file.read_bytes()[:3000])
        with pytest.raises(ValueError, match=r"half\.gguf can't be opened"):
            open_model(str(tmp_path / "half.gguf"))

    def test_several_in_a_folder(self, tmp_path: Path) -> None:
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).touch()
        with pytest.raises(ValueError, match=r"holds 2 GGUF files; name one of them, such as .*a.gguf"):
            open_model(str(tmp_path))

    def test_without_its_packages(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("transformers")
        (tmp_path / "a.gguf").touch()
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"a.gguf needs the package gguf and accelerate: install gatelab\[hf\]"):
            open_model(str(tmp_path))


class TestNames:
    FOUR = r"a GateLab run folder .*, a Hugging Face folder .*, a GGUF file, or a model on the Hugging Face hub"

    @pytest.mark.parametrize("name", ["runs/demo/nothing", "./nothing", "no such file"])
    def test_nothing_there(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} is not {self.FOUR}"):
            open_model(name)

    def test_something_else_there(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").touch()
        for path in (tmp_path, tmp_path / "model.bin"):
            with pytest.raises(ValueError, match=f"is not {self.FOUR}"):
                open_model(str(path))

    def test_the_hub_has_no_such_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        transformers = pytest.importorskip("transformers")

        def unknown(name: str, **options: Any) -> None:
            raise OSError(f"{name} is not a valid model identifier\nand more")

        monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", unknown)
        with pytest.raises(ValueError, match=self.FOUR) as error:
            open_model("nobody/nothing")
        assert str(error.value).startswith("nobody/nothing can't be opened: it is no file or folder here, and the hub")
        assert str(error.value).endswith("(nobody/nothing is not a valid model identifier)")

    def test_the_hub_is_asked_with_the_name_alone(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the hub would give, from a folder."""
        import transformers

        seen = []
        original_dict = transformers.PreTrainedConfig.get_config_dict

        def asked(name: str, **options: Any) -> Any:
            return original_dict(str(llama) if name == "owner/llama" else name, **options)

        for part in (transformers.AutoConfig, transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
            original = part.from_pretrained

            def load(name: str, *, original: Any = original, **options: Any) -> Any:
                seen.append((name, options["trust_remote_code"]))
                return original(str(llama), **options)

            monkeypatch.setattr(part, "from_pretrained", load)
        monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", asked)
        opened = open_model("owner/llama")
        assert [name for name, _ in seen].count("owner/llama") == 3 and {trusted for _, trusted in seen} == {False}
        assert opened.name == "owner/llama" and opened.description["origin"] == "Hugging Face hub"

    def test_a_folder_wins_over_the_hub(self, copied_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(copied_llama.parent)
        assert open_model("llama").description["origin"] == "Hugging Face folder"

    def test_a_run_wins_over_a_configuration(self, run: Path, tmp_path: Path) -> None:
        moved = Path(shutil.copytree(run, tmp_path / "moved"))
        (moved / "config.json").write_text("{}")
        assert open_model(str(moved)).family == "gatelab"

    def test_without_transformers(self, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(ValueError, match=r"needs the package transformers: install gatelab\[hf\]"):
            open_model(str(llama))


class TestMemory:
    def test_what_the_machine_and_the_control_group_leave(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "meminfo").write_text("MemTotal:  90 kB\nMemFree:   7 kB\nMemAvailable:       50 kB\n")
        monkeypatch.setattr(memory, "MEMORY_INFO", tmp_path / "meminfo")
        monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)
        assert memory.available_bytes() == 51_200
        (tmp_path / "memory.max").write_text("30000\n")
        (tmp_path / "memory.current").write_text("20000\n")
        (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 3000\n")
        assert memory.available_bytes() == 13_000
        (tmp_path / "memory.max").write_text("max\n")
        assert memory.available_bytes() == 51_200

    def test_elsewhere_it_is_the_physical_memory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "MEMORY_INFO", tmp_path / "none")
        monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)
        assert memory.available_bytes() > 1e8

    def test_both_sizes_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "available_bytes", lambda: 4_000_000_000)
        memory.require_memory(4_000_000_000, "loading it", "stop")
        with pytest.raises(
            ValueError, match=r"^loading it needs about 61\.00 GB of memory and 4\.00 GB are free; stop$"
        ):
            memory.require_memory(61_000_000_000, "loading it", "stop")


def test_the_package_loads_without_transformers() -> None:
    names = ("models", "texts", "clamp", "precision")
    code = "import sys\n" + "".join(f"import gatelab.evaluate.{name}\n" for name in names)
    code += "print('transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.strip() == "False"
