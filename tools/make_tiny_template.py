"""Write the tiny model's configs, tokenizer and processor: `qwen_edit_zero/assets/tiny/` without the VAE's weights.

    pip install --no-deps dashscope      # ships the real Qwen vocabulary (Apache-2.0)
    python tools/make_tiny_template.py

The vocabulary is a subset of Qwen's own, closed under its merges: the first `FIRST_MERGES` of them and all that the
prompt template and the demo instructions use. Texts made of these are therefore split exactly as the real tokenizer
splits them; in particular the template's prefix is 64 tokens. Any other text falls back to bytes.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import regex
from diffusers import FlowMatchEulerDiscreteScheduler
from transformers import Qwen2_5_VLConfig, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

ASSETS = Path(__file__).parent.parent / "qwen_edit_zero/assets"
OUT = ASSETS / "tiny"
FIRST_MERGES = 1200
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
TEMPLATE = (
    "system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), then "
    "explain how the user's text instruction should alter or modify the image. Generate a new image that meets the "
    "user's requirements while maintaining consistency with the original input where appropriate.\nuser\nassistant\n"
    "Picture 1: Picture 2: Picture 3: "
)
TEXT_WIDTH = 192


def real_ranks() -> dict[bytes, int]:
    """Token bytes -> rank of the real Qwen vocabulary."""
    spec = importlib.util.find_spec("dashscope")
    assert spec is not None, "pip install --no-deps dashscope"
    assert spec.origin is not None
    lines = (Path(spec.origin).parent / "resources/qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


def merge_steps(word: bytes, ranks: dict[bytes, int], below: int | None = None) -> tuple[list[bytes], list[bytes]]:
    """Byte-pair encode one word. Returns its parts and every token made on the way; `below` bounds the ranks used."""
    parts, made = [bytes([b]) for b in word], []
    while True:
        pairs = [a + b for a, b in pairwise(parts)]
        best = min(((ranks[pair], i) for i, pair in enumerate(pairs) if pair in ranks), default=None)
        if best is None or (below is not None and best[0] >= below):
            return parts, made
        i = best[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
        made.append(parts[i])


def printable() -> dict[int, str]:
    """GPT-2's mapping of bytes to printable characters, in which vocab.json and merges.txt are written."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [b for b in range(256) if b not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


def subset(texts: Iterable[str], ranks: dict[bytes, int]) -> tuple[dict[str, int], list[str]]:
    """vocab.json and merges.txt of the part of the vocabulary that `texts` need."""
    needed = {t for t, rank in ranks.items() if 256 <= rank < 256 + FIRST_MERGES}
    for text in texts:
        for word in regex.findall(PRETOKENIZE_REGEX, text):
            needed.update(merge_steps(word.encode(), ranks)[1])
    letters = printable()
    show = {t: "".join(letters[b] for b in t) for t in ranks if len(t) == 1 or t in needed}
    ordered = [bytes([b]) for b in range(256)] + sorted(needed, key=lambda t: ranks[t])
    vocab = {show[t]: i for i, t in enumerate(ordered)}
    merges = []
    for token in ordered[256:]:
        left, right = merge_steps(token, ranks, below=ranks[token])[0]
        assert {left, right} <= set(show), (token, left, right)
        merges.append(f"{show[left]} {show[right]}")
    return vocab, merges


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    instructions = [
        json.loads(line)["instruction"]
        for split in ("train", "validation")
        for line in (ASSETS / f"demo/{split}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    vocab, merges = subset([TEMPLATE, *instructions, " "], real_ranks())
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[tuple(m.split(" ")) for m in merges], additional_special_tokens=SPECIAL[1:],
        model_max_length=131072,
    )  # fmt: skip
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    assert sorted(ids.values()) == list(range(len(vocab), len(vocab) + len(SPECIAL))), ids
    flags = ("lstrip", "rstrip", "normalized", "single_word")
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {
            str(i): {"content": t, "special": True} | dict.fromkeys(flags, False)
            for t, i in ids.items()
        },
        "additional_special_tokens": SPECIAL[1:],
        "add_bos_token": False, "add_prefix_space": False, "bos_token": None, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "unk_token": None, "errors": "replace", "split_special_tokens": False,
        "clean_up_tokenization_spaces": False, "model_max_length": 131072,
    }  # fmt: skip
    write_json(OUT / "tokenizer/tokenizer_config.json", tokenizer_config)
    (OUT / "tokenizer/vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (OUT / "tokenizer/merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")

    pictures = {
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, "patch_size": 14, "temporal_patch_size": 2,
        "processor_class": "Qwen2VLProcessor", "resample": 3, "rescale_factor": 1 / 255,
        "size": {"longest_edge": 12845056, "shortest_edge": 3136}, "min_pixels": 3136, "max_pixels": 12845056,
    }  # fmt: skip
    write_json(OUT / "processor/preprocessor_config.json", pictures)

    rows = -(-(len(vocab) + len(SPECIAL)) // 64) * 64
    text = {
        "vocab_size": rows, "hidden_size": TEXT_WIDTH, "intermediate_size": 384, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"], "use_cache": False,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": TEXT_WIDTH,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
        "fullatt_block_indexes": [1], "tokens_per_second": 2,
    }  # fmt: skip
    Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
        bos_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"],
        architectures=["Qwen2_5_VLForConditionalGeneration"], dtype="bfloat16",
    ).save_pretrained(OUT / "text_encoder")  # fmt: skip

    FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000, shift=1.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9,
        base_image_seq_len=256, max_image_seq_len=8192, shift_terminal=0.02, time_shift_type="exponential",
    ).save_pretrained(OUT / "scheduler")  # fmt: skip
    write_json(
        OUT / "transformer/config.json",
        {
            "_class_name": "QwenImageTransformer2DModel", "_diffusers_version": "0.36.0",
            "attention_head_dim": 32, "axes_dims_rope": [8, 12, 12],
            "guidance_embeds": False, "in_channels": 64,
            "joint_attention_dim": TEXT_WIDTH, "num_attention_heads": 6,
            "num_layers": 4, "out_channels": 16, "patch_size": 2,
        },
    )  # fmt: skip
    write_json(
        OUT / "model_index.json",
        {
            "_class_name": "QwenImageEditPlusPipeline", "_diffusers_version": "0.36.0",
            "processor": ["transformers", "Qwen2VLProcessor"],
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
            "tokenizer": ["transformers", "Qwen2Tokenizer"],
            "transformer": ["diffusers", "QwenImageTransformer2DModel"],
            "vae": ["diffusers", "AutoencoderKLQwenImage"],
        },
    )  # fmt: skip

    loaded = Qwen2Tokenizer.from_pretrained(OUT / "tokenizer")
    assert {t: loaded.convert_tokens_to_ids(t) for t in SPECIAL} == ids
    print(f"{len(vocab)} tokens + {len(SPECIAL)} special, {rows} rows")


if __name__ == "__main__":
    main()
