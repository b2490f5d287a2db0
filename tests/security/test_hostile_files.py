"""Files from strangers: each would leave a mark, read elsewhere or never end if it were believed."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gatelab.data.corpora import speech_documents
from gatelab.data.settings import BigramBackcopySettings, CorpusSettings, DataSettings
from gatelab.data.shard_writing import write_shards
from gatelab.data.shards import TokenShards
from gatelab.data.text_files import read_file, read_hugging_face
from gatelab.data.tokenizer import Tokenizer, train_tokenizer
from gatelab.evaluate.gguf_header import require_sound_gguf
from gatelab.evaluate.models import open_model
from gatelab.files import default_folder, parse_json, sha256
from gatelab.gates.spec import GateSpec
from gatelab.interop.loading import open_checkpoint
from gatelab.interop.model_card import ModelCard, render_model_card
from gatelab.interop.tensor_files import INDEX, open_tensors
from gatelab.model.decoder import Decoder
from gatelab.model.settings import ModelSettings
from gatelab.train.checkpoint import load_checkpoint, save_checkpoint
from gatelab.train.run_folder import RunFolder
from gatelab.train.settings import RunSettings

DEEP = 100_000
SIZES = {
    "vocab_size": 29, "width": 24, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_size": 10,
    "feedforward_width": 36, "max_context": 21,
}  # fmt: skip


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


class TestSettings:
    @pytest.mark.parametrize(
        "tag", ["!!python/object/apply:pathlib.Path.touch [MARK]", "!!python/name:os.system", "!x"]
    )
    def test_a_tag_makes_no_object(self, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=r"settings have no tags, but there is one: .*; write the plain value"):
            DataSettings.from_yaml(f"context: {tag}")
        with pytest.raises(ValueError, match="is not readable as YAML"):
            DataSettings().with_overrides([f"context={tag}"])
        assert not list(tmp_path.iterdir())

    def test_aliases_are_not_multiplied(self) -> None:
        lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
        with pytest.raises(ValueError, match=r"settings have no aliases, but there is one at \*a0; write"):
            DataSettings.from_yaml("\n".join(lines))

    @pytest.mark.parametrize("text", ["[" * DEEP, "{a: " * DEEP, "- " * DEEP])
    def test_nesting_ends(self, text: str) -> None:
        with pytest.raises(ValueError, match="it is nested too deeply"):
            DataSettings.from_yaml(text)

    def test_length_ends(self) -> None:
        with pytest.raises(ValueError, match="it has 2,000,001 characters, more than the 1,000,000 that are read"):
            DataSettings.from_yaml("#" * 2_000_001)

    def test_many_and_long_mistakes_are_told_in_short(self) -> None:
        with pytest.raises(ValueError, match="and 9980 mistakes more") as error:
            DataSettings.parse({f"key{number}": "x" * 10_000 for number in range(10_000)})
        assert len(str(error.value)) < 20_000
        with pytest.raises(ValueError, match=r"context cannot be '[x]{199}\.\.\.:"):
            DataSettings.parse({"context": "x" * 10**6})

    @pytest.mark.parametrize("value", ["gatelab.gates.spec.GateSpec", "os.system", "__import__('os')"])
    def test_a_dotted_path_is_text(self, value: str) -> None:
        with pytest.raises(ValueError, match="activation cannot be"):
            GateSpec().with_overrides([f"activation={value}"])

    @pytest.mark.parametrize("name", ["num_layers", "width", "num_heads", "vocab_size", "head_size", "max_context"])
    def test_sizes_beyond_any_machine_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"{name} cannot be 10000000000000000"):
            ModelSettings.parse({**SIZES, name: 10**16})


class TestShards:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_shards(tmp_path, ["the gate", "opens"], train_tokenizer(["the gate"], 270), tokens_per_shard=1000)
        return tmp_path

    def rewrite(self, folder: Path, content: bytes) -> None:
        path = folder / "00000.tokens"
        path.write_bytes(content)
        (folder / "00000.tokens.sha256").write_text(f"{sha256(path)}  {path.name}\n")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("dtype", "object"), ("dtype", "S99999999"), ("dtype", ["uint16"]), ("num_tokens", -1), ("num_tokens", 1.0),
            ("num_tokens", 2**63), ("num_documents", 0), ("is_last", 1), ("number", True), ("more", 1),
        ],
    )  # fmt: skip
    def test_a_header_says_nothing_impossible(self, folder: Path, key: str, value: Any) -> None:
        content = (folder / "00000.tokens").read_bytes()
        header = json.loads(content[8:1024]) | {key: value}
        self.rewrite(folder, content[:8] + json.dumps(header).encode().ljust(1016) + content[1024:])
        with pytest.raises(ValueError, match=r"00000\.tokens has a damaged header"):
            TokenShards(folder)

    @pytest.mark.parametrize(("at", "value"), [(-32, 1), (-24, 0), (-24, 2**62), (-24, -(2**63)), (-8, -1), (-8, 99)])
    def test_documents_agree_with_the_header(self, folder: Path, at: int, value: int) -> None:
        """Starts of two documents, then their bytes of text; the checksum is right."""
        content = bytearray((folder / "00000.tokens").read_bytes())
        stop = len(content) + at + 8
        content[stop - 8 : stop] = np.array([value], "<i8").tobytes()
        self.rewrite(folder, bytes(content))
        with pytest.raises(ValueError, match=r"00000\.tokens has tokens or documents that contradict its header"):
            TokenShards(folder)

    def test_tokens_agree_with_the_header(self, folder: Path) -> None:
        content = bytearray((folder / "00000.tokens").read_bytes())
        content[1026:1028] = b"\xff\xff"
        self.rewrite(folder, bytes(content))
        with pytest.raises(ValueError, match="contradict its header"):
            TokenShards(folder)


class TestCheckpoints:
    @pytest.mark.parametrize("name", ["optimizer.safetensors", ".metadata", "optimizer.pt"])
    def test_a_pickle_beside_the_weights_runs_nothing(self, tmp_path: Path, name: str) -> None:
        """In the optimizer's place, and where distributed checkpoints and older programs keep theirs."""
        decoder = Decoder(ModelSettings.parse(SIZES))
        optimizer = torch.optim.AdamW(decoder.parameters())
        checkpoint = save_checkpoint(tmp_path, 3, decoder, optimizer, keep=1)
        file, manifest = checkpoint / name, checkpoint / "manifest.json"
        before = sha256(file) if file.exists() else None
        file.write_bytes(pickle.dumps(Evil(tmp_path / "MARK"), protocol=2))
        if before is None:
            assert load_checkpoint(checkpoint, decoder, optimizer) == 3
        else:
            manifest.write_text(manifest.read_text().replace(before, sha256(file)))
            with pytest.raises(ValueError, match="no part of a checkpoint"):
                load_checkpoint(checkpoint, decoder, optimizer)
        assert not (tmp_path / "MARK").exists()

    def test_names_in_a_manifest_cannot_leave_its_folder(self, tmp_path: Path) -> None:
        decoder = Decoder(ModelSettings.parse(SIZES))
        optimizer = torch.optim.AdamW(decoder.parameters())
        checkpoint = save_checkpoint(tmp_path, 3, decoder, optimizer, keep=1)
        (checkpoint / "model.safetensors").rename(tmp_path / "model.safetensors")
        manifest = checkpoint / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"model.saf', '"../model.saf'))
        with pytest.raises(ValueError, match=r"\.\./model\.safetensors is missing, and manifest"):
            load_checkpoint(checkpoint, decoder, optimizer)

    @pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "", ".", 3])
    def test_an_index_names_files_of_its_folder(self, tmp_path: Path, name: Any) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        save_file({"x": torch.zeros(2)}, tmp_path / "secret.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(ValueError, match=r"which is not one of its folder|is missing, though"):
            open_tensors(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        with pytest.raises(ValueError, match=r"which is not one of its folder|can't be opened"):
            open_model(str(folder))

    def test_an_adapter_names_no_other_model(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/else"}))
        with pytest.raises(ValueError, match=r"adapter_config\.json, which names another model to load in its place"):
            open_model(str(tmp_path))

    @pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts", "num_nextn_predict_layers"])
    @pytest.mark.parametrize("value", [10**9, -1, "3", 2.5, True])
    def test_counts_in_a_configuration_are_possible(self, tmp_path: Path, key: str, value: Any) -> None:
        save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", key: value}))
        with pytest.raises(ValueError, match=rf"config\.json has {key}=.*, which is no number from 0 to"):
            open_checkpoint(tmp_path)

    def test_deep_json_is_an_error_of_the_file(self, tmp_path: Path) -> None:
        for text in ("[" * DEEP, b"\xff", "9" * 5000, '{"a":' * DEEP):
            with pytest.raises(json.JSONDecodeError):
                parse_json(text)
        (tmp_path / "config.json").write_text("[" * DEEP)
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            open_checkpoint(tmp_path)


class TestRunFolders:
    @pytest.fixture
    def run(self, tmp_path: Path) -> RunFolder:
        run = RunFolder(tmp_path / "run")
        (run.path / "checkpoints").mkdir(parents=True)
        data = DataSettings(context=21, synthetic=BigramBackcopySettings(vocab_size=29))
        settings = RunSettings(model=ModelSettings.parse(SIZES), data=data)
        (run.path / "settings.yaml").write_text(settings.to_yaml())
        (run.path / "environment.json").write_text("{}")
        described = {"fingerprint": "", "heldout": [], "attributions": []}
        (run.path / "data.json").write_text(json.dumps(described))
        run.require_whole()
        return run

    @pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/step_00000003", "measurement.json"])
    def test_a_link_out_of_it_is_not_written_through(self, run: RunFolder, tmp_path: Path, name: str) -> None:
        (tmp_path / "mine").write_text("dear")
        (run.path / name).symlink_to(tmp_path / "mine")
        with pytest.raises(ValueError, match=f"{name} is a link out of the run's folder; put the file itself there"):
            run.require_whole()
        assert (tmp_path / "mine").read_text() == "dear"

    def test_a_run_folder_itself_may_be_a_link(self, run: RunFolder, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(run.path)
        RunFolder(tmp_path / "link").require_whole()

    def test_deep_json(self, run: RunFolder) -> None:
        (run.path / "data.json").write_text("[" * DEEP)
        with pytest.raises(ValueError, match=r"data\.json is unreadable: it is nested too deeply"):
            run.require_whole()


class TestTexts:
    @pytest.mark.parametrize("content", ["[" * DEEP, "9" * 5000])
    def test_rows_that_overwhelm_a_parser(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text(content + "\n")
        with pytest.raises(ValueError, match=r"rows\.jsonl, line 1 is not JSON"):
            list(read_file(path, path.name, CorpusSettings(name="files", path=str(path))))

    def test_a_script_beside_a_dataset_is_not_run(self, tmp_path: Path) -> None:
        folder = tmp_path / "texts"
        folder.mkdir()
        (folder / "texts.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'MARK')!r}).touch()\n")
        (folder / "rows.jsonl").write_text('{"text": "the gate", "image": "no image"}\n')
        settings = CorpusSettings(name="hugging_face", path=str(folder))
        with pytest.raises(ValueError, match=r"can't be opened: Dataset scripts are no longer supported"):
            list(read_hugging_face(settings))
        assert not (tmp_path / "MARK").exists()

    def test_a_dataset_is_read_no_further_than_asked(self, tmp_path: Path) -> None:
        """The second file is no JSON: whoever opens it fails."""
        (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(40)))
        (tmp_path / "b.jsonl").write_text("no JSON\n")
        rows = read_hugging_face(CorpusSettings(name="hugging_face", path=str(tmp_path)))
        assert [next(rows).text for _ in range(9)] == [f"row {number}" for number in range(9)]
        rows.close()  # type: ignore[attr-defined]

    def test_members_of_an_archive_stay_in_it(self, tmp_path: Path) -> None:
        """Members are read, never unpacked; links, devices and names with dots are passed over."""
        (tmp_path / "secret").write_text("secret")
        path = tmp_path / "speeches.tgz"
        with tarfile.open(path, "w:gz") as archive:
            for name, kind, target in [
                ("package/sotu/data/linked.txt", tarfile.SYMTYPE, str(tmp_path / "secret")),
                ("package/sotu/data/hard.txt", tarfile.LNKTYPE, "../../secret"),
                ("package/sotu/data/pipe.txt", tarfile.FIFOTYPE, ""),
                ("package/sotu/data/../../../up.txt", tarfile.REGTYPE, ""),
                ("/package/sotu/data/root.txt", tarfile.REGTYPE, ""),
                ("package/sotu/data/good.txt", tarfile.REGTYPE, ""),
            ]:
                member = tarfile.TarInfo(name)
                member.type, member.linkname, member.size = kind, target, 4 * (kind == tarfile.REGTYPE)
                archive.addfile(member, io.BytesIO(b"text"))
        assert [(one.title, one.text) for one in speech_documents(path)] == [("good", "text")]
        assert not (tmp_path / "up.txt").exists() and not (tmp_path.parent / "up.txt").exists()


class TestTokenizers:
    @pytest.mark.parametrize("text", ["[" * DEEP, "{}", '{"version": "1.0", "model": {"type": "pickle"}}', "\x00"])
    def test_what_is_none(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"not a readable tokenizer\.json"):
            Tokenizer.from_text(text)


class TestGGUF:
    COUNTS = (0).to_bytes(8, "little") + (1).to_bytes(8, "little")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"GGUX" + bytes(40), "doesn't begin with GGUF"),
            (b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 16, "announces .* bytes where 0 are left"),
            (b"GGUF" + b"\x09\x00\x00\x00" + bytes(40), "has version 9"),
            (b"GGUF\x03\x00\x00\x00" + COUNTS + b"\xff" * 8 + bytes(40), "announces 18446744073709551615 bytes"),
            # An array of 2**60 bytes: the parser behind it would make one object for each.
            (
                b"GGUF\x03\x00\x00\x00" + COUNTS + b"\x01" + bytes(7) + b"k\x09\x00\x00\x00" + bytes(4)
                + (2**60).to_bytes(8, "little") + bytes(40),
                "announces 1152921504606846976 bytes where 40 are left",
            ),
            (
                b"GGUF\x03\x00\x00\x00" + COUNTS + b"\x01" + bytes(7) + b"k" + 2 * b"\x09\x00\x00\x00" + bytes(50),
                "a value of the unknown type 9",
            ),
        ],
    )  # fmt: skip
    def test_no_count_is_believed(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        began = time.monotonic()
        for read in (require_sound_gguf, lambda file: open_model(str(file))):
            with pytest.raises(ValueError, match=rf"model\.gguf can't be opened: it is no sound GGUF .*{message}"):
                read(path)
        assert time.monotonic() - began < 60, "it read on where there is nothing"


class TestNames:
    @pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", "..", "a/../..", "-rf", "$(touch MARK)", "\n", "x\0"])
    def test_a_model_s_name_stays_below_runs(self, name: str) -> None:
        folder = default_folder("diagnose", [name])
        assert folder.parts[:2] == ("runs", "diagnose") and len(folder.parts) == 3
        assert not folder.name.startswith((".", "-")) and "\0" not in folder.name

    @pytest.mark.parametrize("name", ["https://host/model", "owner/../../model", "-owner/model", "a/b/c", "a b"])
    def test_only_names_are_looked_up_on_the_hub(self, name: str) -> None:
        with pytest.raises(ValueError, match="is not a GateLab run folder"):
            open_model(name)

    def test_a_model_card_holds_text_alone(self) -> None:
        hostile = "<script>alert(1)</script>\n# [x](javascript:1) | `y`"
        card = ModelCard(name=hostile, recipe=hostile, data=hostile, license=hostile, results={hostile: hostile})
        text = render_model_card(ModelSettings.parse(SIZES), card).split("---", 2)[2]
        assert text.count("\\<script\\>") == 5 and text.count("<script") == text.count("\\<script")
        assert "\n# [" not in text and "](" not in text.replace("\\](", "")
