"""Turn a run of `train_tiny_vae.py` into the shipped VAE: config and half-precision weights.

python tools/publish_tiny_vae.py RUN
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

OUT = Path(__file__).parent.parent / "qwen_edit_zero/assets/tiny/vae"


def main() -> None:
    run = Path(sys.argv[1])
    facts = json.loads((run / "facts.json").read_text(encoding="utf-8"))
    weights = {name: value.half().contiguous() for name, value in load_file(run / "average.safetensors").items()}
    config = {
        "_class_name": "AutoencoderKLQwenImage",
        "_diffusers_version": "0.36.0",
        "attn_scales": [],
        **facts["config"],
        "dropout": 0.0,
        "temperal_downsample": [False, True, True],
        "latents_mean": [round(v, 4) for v in facts["latents_mean"]],
        "latents_std": [round(v, 4) for v in facts["latents_std"]],
    }
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights, OUT / "last_time_slice.safetensors", {"format": "pt"})
    (OUT / "last_time_slice.safetensors").chmod(0o644)
    size = (OUT / "last_time_slice.safetensors").stat().st_size
    print(f"step {facts['step']}, held-out PSNR {facts['held_out_psnr']:.2f} dB, {size} bytes")


if __name__ == "__main__":
    main()
