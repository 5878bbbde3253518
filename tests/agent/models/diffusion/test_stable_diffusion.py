"""Folders of Stable Diffusion: read as diffusers itself reads them, or refused; and nobody is called."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from agent.models.diffusion.stable_diffusion import Schedule, StableMissingError, part_of, schedule_of
from agent.models.diffusion.stable_loading import folder_digest, load_stable
from agent.models.published.loading import PublishedWeightsError
from agent.models.training_loop import torch_generator
from agent.models.weights import WeightsError

PARTS = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}
_SEEN: list[str] = []  # of the network, by the audit hook
_WATCHING: list[bool] = []


def _hook(event: str, _: tuple[Any, ...]) -> None:
    if _WATCHING and event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        _SEEN.append(event)


def bare(folder: Path) -> Path:
    """A folder of the right form whose weights are those of nothing: needs no diffusers."""
    weights = safetensors.torch.save({"weight": torch.zeros(1)})
    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline", "tokenizer": ["transformers", "CLIPTokenizer"]}
    for part, name in PARTS.items():
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text("{}")
        file = "model" if part == "text_encoder" else "diffusion_pytorch_model"
        (folder / part / f"{file}.safetensors").write_bytes(weights)
        index[part] = ["transformers" if part == "text_encoder" else "diffusers", name]
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text('{"<|startoftext|>": 0, "<|endoftext|>": 1, "a": 2}')
    (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    (folder / "scheduler").mkdir()
    noise = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(noise))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def changed(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def load(folder: Path, **more: Any) -> Any:
    return load_stable(folder, {folder_digest(folder)}, **more)


def test_a_folder_that_nobody_vouches_for_is_refused_whatever_is_in_it(tmp_path: Path) -> None:
    folder = bare(tmp_path / "f")
    for vouched in (set(), {"0" * 64}, {folder_digest(bare(tmp_path / "g"))[:63]}):
        with pytest.raises(PublishedWeightsError, match="vouched"):
            load_stable(folder, vouched)


def test_a_byte_changed_in_any_file_that_is_used_is_another_folder(tmp_path: Path) -> None:
    folder = bare(tmp_path / "f")
    digest = folder_digest(folder)
    assert digest == folder_digest(bare(tmp_path / "elsewhere"))
    used = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    assert len(used) == 11
    for path in used:
        before = path.read_bytes()
        path.write_bytes(before + b" ")
        assert folder_digest(folder) != digest
        with pytest.raises(PublishedWeightsError):
            load_stable(folder, {digest})
        path.write_bytes(before)
    (folder / "safety_checker").mkdir()
    (folder / "safety_checker" / "pytorch_model.bin").write_bytes(b"code")
    (folder / "README.md").write_text("words")
    assert folder_digest(folder) == digest


def test_every_file_vouched_for_by_itself_is_enough_and_one_less_is_not(tmp_path: Path) -> None:
    folder = bare(tmp_path / "f")
    each = {hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises((StableMissingError, WeightsError)) as found:  # it gets as far as the networks, which are none
        load_stable(folder, each)
    assert not isinstance(found.value, PublishedWeightsError)
    for one in each:
        with pytest.raises(PublishedWeightsError):
            load_stable(folder, each - {one})


@pytest.mark.parametrize(
    "name", ["model_index.json", "scheduler/scheduler_config.json", "unet/config.json", "vae/config.json",
             "tokenizer/merges.txt", "tokenizer/tokenizer_config.json", "text_encoder/config.json"],
)  # fmt: skip
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    folder = bare(tmp_path)
    (folder / name).unlink()
    with pytest.raises(WeightsError, match=name):
        folder_digest(folder)


@pytest.mark.parametrize("part", sorted(PARTS))
def test_pickled_weights_are_never_opened(part: str, tmp_path: Path) -> None:
    folder = bare(tmp_path)
    path = next((folder / part).glob("*.safetensors"))
    path.rename(path.with_suffix(".bin"))
    with pytest.raises(WeightsError, match=f"{part}: no .*safetensors"):
        folder_digest(folder)


@pytest.mark.parametrize(
    "keys",
    [{"_class_name": "StableDiffusionXLPipeline"}, {"_class_name": "os.system"}, {"unet": None},
     {"unet": ["diffusers", "UNet3DConditionModel"]}, {"vae": ["mine", "Evil"]}, {"text_encoder": "CLIPTextModel"},
     {"tokenizer": ["transformers", "T5Tokenizer"]}],
)  # fmt: skip
def test_a_folder_of_another_family_is_refused_by_name(keys: dict[str, Any], tmp_path: Path) -> None:
    folder = bare(tmp_path)
    changed(folder / "model_index.json", **keys)
    with pytest.raises(WeightsError, match=r"model_index\.json"):
        load(folder)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_configuration_that_is_no_table_is_refused(raw: bytes, tmp_path: Path) -> None:
    folder = bare(tmp_path)
    (folder / "model_index.json").write_bytes(raw)
    with pytest.raises(WeightsError, match="configuration"):
        load(folder)


def test_weights_that_are_code_no_numbers_or_too_large_are_refused() -> None:
    good = safetensors.torch.save({"a": torch.zeros(2, dtype=torch.float16)})
    assert part_of(b'{"_x": 1, "b": 2}', good).config == {"b": 2}
    assert part_of(b"{}", good).state["a"].dtype == torch.float32
    for weights in (b"", b"\x80\x04code", good[:-1], safetensors.torch.save({"a": torch.tensor([math.nan])})):
        with pytest.raises(WeightsError):
            part_of(b"{}", weights)
    for config in (b'{"n": 1e9}', b'{"n": [4, 99999999999]}', b'{"n": Infinity}', b'{"n": NaN}'):
        with pytest.raises(WeightsError, match="number"):
            part_of(config, good)


def test_the_schedule_is_stable_diffusions_and_others_are_refused() -> None:
    told = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
    schedule = schedule_of(told)
    assert schedule.prediction == "epsilon"
    assert schedule_of(told | {"prediction_type": "v_prediction"}).prediction == "v"
    kept, by_hand = schedule.kept, 1.0
    for t in range(1000):
        by_hand *= 1 - (math.sqrt(0.00085) + t / 999 * (math.sqrt(0.012) - math.sqrt(0.00085))) ** 2
        assert float(kept[t]) == pytest.approx(by_hand, rel=1e-9)
    assert float(kept[-1]) == pytest.approx(0.0047, abs=1e-4)  # published: Lin et al. 2024, Table 1: 0.068265^2
    assert Schedule("v", 10, 0.1, 0.2, scaled=False).kept[0] == pytest.approx(0.9)
    wrong: list[dict[str, Any]] = [
        {"beta_schedule": "squaredcos_cap_v2"}, {"prediction_type": "sample"}, {"trained_betas": [0.1]},
        {"rescale_betas_zero_snr": True}, {"beta_start": "0.1"}, {"beta_end": math.nan}, {"num_train_timesteps": 0},
    ]  # fmt: skip
    for keys in wrong:
        with pytest.raises(WeightsError, match="schedule"):
            schedule_of(told | keys)


@pytest.mark.parametrize("missing", ["diffusers", "transformers"])
def test_without_the_libraries_a_sentence_says_what_to_install(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "diffusers":
        monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(StableMissingError, match=r"install lazaret\[stable\]"):
        load(bare(tmp_path))


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    letters = [chr(i) for i in range(97, 123)]
    merges = [("e", "d"), ("ed", "e"), ("m", "a</w>"), ("ede", "ma</w>")]
    tokens = [
        *letters,
        *(f"{c}</w>" for c in letters),
        *(a + b for a, b in merges),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    return {token: place for place, token in enumerate(tokens)}, merges


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A whole pipeline of random weights as diffusers writes it: the folder, and diffusers' own object."""
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers and transformers: install lazaret[stable]")
    transformers = pytest.importorskip("transformers", reason="needs transformers: install lazaret[stable]")
    words, merges = vocabulary()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch_generator(0).get_state())
        text = transformers.CLIPTextConfig(
            vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=24, bos_token_id=words["<|startoftext|>"], eos_token_id=words["<|endoftext|>"],
            hidden_act="gelu",
        )  # fmt: skip
        made = diffusers.StableDiffusionPipeline(
            vae=diffusers.AutoencoderKL(
                block_out_channels=(8, 16), norm_num_groups=4, sample_size=16, scaling_factor=0.25,
                down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            ),
            text_encoder=transformers.CLIPTextModel(text),
            tokenizer=transformers.CLIPTokenizer(vocab=words, merges=merges, model_max_length=24),
            unet=diffusers.UNet2DConditionModel(
                block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=32, norm_num_groups=4,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=4, sample_size=8,
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            ),
            scheduler=diffusers.PNDMScheduler(
                beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type="v_prediction",
                skip_prk_steps=True, steps_offset=1,
            ),
            safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        )  # fmt: skip
    folder = tmp_path_factory.mktemp("stable")
    made.save_pretrained(folder, safe_serialization=True)
    for part in (made.vae, made.unet, made.text_encoder):
        part.requires_grad_(requires_grad=False).train(mode=False)
    return folder, made


@pytest.fixture
def folder(pipeline: tuple[Path, Any], tmp_path: Path) -> Path:
    shutil.copytree(pipeline[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_pictures_and_latents_are_those_of_diffusers(pipeline: tuple[Path, Any]) -> None:
    loaded, made = load(pipeline[0]), pipeline[1]
    own = loaded.autoencoder
    assert (own.shape, own.latent, own.scale) == ((16, 16, 3), (4, 8, 8), 0.25)
    assert own.origin.component == "public"
    assert own.origin.sha256 == folder_digest(pipeline[0])
    x = torch.rand(3, 3, 16, 16, generator=torch_generator(0)) * 2 - 1
    told = made.vae.encode(x).latent_dist
    assert torch.allclose(own.encode(x), told.mean * 0.25, atol=1e-6)
    assert torch.allclose(own.decode(own.encode(x)), made.vae.decode(told.mean).sample.clamp(-1, 1), atol=1e-5)
    noise = torch.randn(told.mean.shape, generator=torch_generator(1))
    assert torch.allclose(own.encode(x, torch_generator(1)), (told.mean + told.std * noise) * 0.25, atol=1e-6)
    grey = load(pipeline[0], shape=(32, 32)).autoencoder
    assert (grey.shape, grey.latent, grey.channels) == ((32, 32), (4, 16, 16), 1)
    y = torch.rand(2, 1, 32, 32, generator=torch_generator(0))
    assert torch.allclose(grey.encode(y), made.vae.encode(y.repeat(1, 3, 1, 1)).latent_dist.mean * 0.25, atol=1e-6)
    assert grey.decode(grey.encode(y)).shape == y.shape
    assert grey.maps(x)[0].shape == (3, 4, 16, 16)
    for wrong in (x[:, :1], x[..., :8]):
        with pytest.raises(ValueError, match="images are"):
            own.encode(wrong)
    with pytest.raises(ValueError, match="latents are"):
        own.decode(x)
    for shape in ((17, 17), (16, 32), (1, 1)):
        with pytest.raises(WeightsError, match="multiple"):
            load(pipeline[0], shape=shape)


def test_what_the_denoiser_says_of_prompts_is_what_diffusers_says(pipeline: tuple[Path, Any]) -> None:
    loaded, made = load(pipeline[0]), pipeline[1]
    texts = ["edema", "A  Made-up edema", "", "edema"]
    tokens = loaded.clip.tokens(texts)
    theirs = made.tokenizer(
        texts, padding="max_length", max_length=24, truncation=True, return_tensors="pt"
    ).input_ids
    assert torch.equal(tokens, theirs)
    z = torch.randn(4, 4, 8, 8, generator=torch_generator(0))
    t = torch.tensor([0, 10, 500, 999])
    context = made.text_encoder(theirs)[0]
    expected = made.unet(z, t, encoder_hidden_states=context).sample
    net = loaded.denoiser.train(mode=False)
    assert torch.allclose(net(z, t, tokens), expected, atol=1e-5)
    assert not torch.allclose(net(z, t, tokens[[2, 2, 2, 2]]), expected, atol=1e-4)
    nothing = net(z, t, torch.zeros_like(tokens))  # zeros are no condition: the empty prompt
    assert torch.allclose(nothing, net(z, t, tokens[[2, 2, 2, 2]]), atol=1e-6)
    assert loaded.schedule == Schedule("v", 1000, 0.00085, 0.012, scaled=True)
    assert torch.allclose(loaded.schedule.kept.float(), made.scheduler.alphas_cumprod, rtol=1e-4)
    with pytest.raises(ValueError, match="22 tokens"):
        loaded.clip.tokens(["a " * 23])
    assert loaded.clip.tokens([]).shape == (0, 24)


def test_only_the_denoiser_learns(pipeline: tuple[Path, Any]) -> None:
    loaded = load(pipeline[0])
    net = loaded.denoiser.train()
    net(torch.zeros(1, 4, 8, 8), torch.tensor([3]), loaded.clip.tokens(["edema"])).square().mean().backward()
    assert not any(p.requires_grad for p in [*net.text.parameters(), *loaded.autoencoder.parameters()])
    assert not net.text.training
    assert all(p.requires_grad and p.grad is not None for p in net.unet.parameters())


def test_reading_a_folder_calls_nobody(pipeline: tuple[Path, Any]) -> None:
    import socket

    sys.addaudithook(_hook)
    _WATCHING.append(True)
    try:
        loaded = load(pipeline[0])
        loaded.denoiser(torch.zeros(1, 4, 8, 8), torch.tensor([3]), loaded.clip.tokens(["edema"]))
        assert _SEEN == []
        with socket.socket() as probe:  # the instrument sees what it is for
            probe.settimeout(0.1)
            probe.connect_ex(("127.0.0.1", 9))
        assert _SEEN == ["socket.connect"]
    finally:
        _WATCHING.clear()


def test_the_two_files_of_a_tokenizer_and_the_one_say_the_same(folder: Path) -> None:
    expected = load(folder).clip.tokens(["edema ma", "demand"])
    words, merges = vocabulary()
    (folder / "tokenizer" / "tokenizer.json").unlink()
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(words))
    (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    assert torch.equal(load(folder).clip.tokens(["edema ma", "demand"]), expected)
    (folder / "tokenizer" / "special_tokens_map.json").write_text('{"pad_token": {"content": "a"}}')
    filled = load(folder).clip.tokens(["edema"])  # version 2 fills up with token 0
    assert filled[0, -1] == 0
    assert filled[0, 0] == words["<|startoftext|>"]


def test_names_of_older_folders_are_understood(folder: Path) -> None:
    x = torch.rand(1, 3, 16, 16, generator=torch_generator(0))
    before = load(folder)
    expected, heard = before.autoencoder.encode(x), before.denoiser.context(before.clip.tokens(["edema"]))

    def rewrite(path: Path, change: Callable[[str], str], **more: torch.Tensor) -> None:
        state = {change(n): t for n, t in safetensors.torch.load(path.read_bytes()).items()} | more
        path.write_bytes(safetensors.torch.save(state))

    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def aged(name: str) -> str:
        for new, was in old.items():
            name = name.replace(f".{new}.", f".{was}.")
        return name

    rewrite(folder / "vae" / "diffusion_pytorch_model.safetensors", aged)
    places = {"text_model.embeddings.position_ids": torch.arange(24)[None]}
    rewrite(folder / "text_encoder" / "model.safetensors", lambda n: f"text_model.{n}", **places)
    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    half = {n: t.half() for n, t in safetensors.torch.load(path.read_bytes()).items()}
    path.with_suffix(".fp16.safetensors").write_bytes(safetensors.torch.save(half))
    path.unlink()
    after = load(folder)
    assert torch.equal(after.autoencoder.encode(x), expected)
    assert torch.equal(after.denoiser.context(after.clip.tokens(["edema"])), heard)
    assert {p.dtype for p in after.denoiser.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("file", "keys"),
    [("unet/config.json", {"block_out_channels": [8, 8]}), ("unet/config.json", {"more": 1}),
     ("unet/config.json", {"down_block_types": ["os.system", "DownBlock2D"]}),
     ("unet/config.json", {"addition_embed_type": "text"}), ("unet/config.json", {"num_class_embeds": 3}),
     ("unet/config.json", {"cross_attention_dim": 64}), ("unet/config.json", {"in_channels": 9}),
     ("vae/config.json", {"latent_channels": 3}), ("vae/config.json", {"scaling_factor": 0.0}),
     ("vae/config.json", {"scaling_factor": "1"}), ("vae/config.json", {"shift_factor": 0.1}),
     ("vae/config.json", {"in_channels": 1}), ("vae/config.json", {"norm_num_groups": 5}),
     ("text_encoder/config.json", {"num_hidden_layers": 3}),
     ("text_encoder/config.json", {"num_hidden_layers": 10**6}),
     ("text_encoder/config.json", {"hidden_act": "eval"}), ("text_encoder/config.json", {"vocab_size": 10}),
     ("text_encoder/config.json", {"max_position_embeddings": 8}),
     ("tokenizer/tokenizer.json", {"model": None}),
     ("tokenizer/tokenizer.json", {"model": {"vocab": {}, "merges": []}}),
     ("tokenizer/tokenizer.json", {"model": {"vocab": {"<|startoftext|>": 0, "<|endoftext|>": 5}, "merges": []}}),
     ("tokenizer/tokenizer.json", {"model": {"vocab": {"<|startoftext|>": 0, "<|endoftext|>": 1}, "merges": [1]}}),
     ("tokenizer/tokenizer.json",
      {"model": {"vocab": {"<|startoftext|>": 0, "<|endoftext|>": 1}, "merges": [["a", "b"]]}}),
     ("tokenizer/tokenizer_config.json", {"model_max_length": 1e30}),
     ("tokenizer/tokenizer_config.json", {"model_max_length": 77}),
     ("tokenizer/tokenizer_config.json", {"pad_token": 1}),
     ("scheduler/scheduler_config.json", {"beta_schedule": "cosine"})],
)  # fmt: skip
def test_parts_that_do_not_fit_together_are_refused(file: str, keys: dict[str, Any], folder: Path) -> None:
    changed(folder / file, **keys)
    with pytest.raises(WeightsError):
        load(folder)


@pytest.mark.parametrize("part", sorted(PARTS))
def test_a_tensor_that_is_missing_or_too_many_is_refused(part: str, folder: Path) -> None:
    path = next((folder / part).glob("*.safetensors"))
    state = safetensors.torch.load(path.read_bytes())
    for other in (dict(list(state.items())[1:]), state | {"more": torch.zeros(1)}):
        path.write_bytes(safetensors.torch.save(other))
        with pytest.raises(WeightsError, match=r"1 tensor"):
            load(folder)
