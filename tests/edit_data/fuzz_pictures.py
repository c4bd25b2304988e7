"""Run as a program: decode seeded mutations of picture files under limits of memory and time, and report as JSON.

Beside this process, so that a crash of a decoder ends this one and not the tests.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import sys
import time
import zlib

import numpy as np
from PIL import Image

from qwen_edit_zero.edit_data.pictures.decode import load_mask, load_picture, picture_size
from qwen_edit_zero.errors import DataError
from tests.edit_data.raw_pictures import encoded, held


def seeds() -> dict[str, list[bytes]]:
    """Files of every format, in several kinds each."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 56, 4), dtype=np.uint8)
    noise[10:30, 10:40] = (200, 40, 40, 255)
    rgba, exif = Image.fromarray(noise), Image.Exif()
    rgb, exif[0x0112] = rgba.convert("RGB"), 6
    grey16 = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    frames = {"save_all": True, "append_images": [rgb.rotate(180)]}
    return {
        "JPEG": [encoded(rgb, "JPEG", exif=exif), encoded(rgb, "JPEG", progressive=True),
                 encoded(rgb.convert("CMYK"), "JPEG"), encoded(rgb, "MPO", **frames)],
        "PNG": [encoded(rgba, "PNG"), encoded(rgb.quantize(16), "PNG"), encoded(grey16, "PNG"),
                encoded(rgb, "PNG", **frames)],
        "WEBP": [encoded(rgba, "WEBP"), encoded(rgb, "WEBP", lossless=True), encoded(rgb, "WEBP", exif=exif, **frames)],
        "GIF": [encoded(rgb.quantize(64), "GIF"), encoded(rgb, "GIF", **frames)],
        "BMP": [encoded(rgb, "BMP"), encoded(rgb.quantize(16), "BMP"), encoded(rgb.convert("1"), "BMP")],
        "TIFF": [encoded(rgb, "TIFF", compression=c) for c in ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg")]
        + [encoded(grey16, "TIFF"), encoded(rgb.convert("1"), "TIFF", compression="group4")],
        "AVIF": [encoded(rgba, "AVIF"), encoded(rgb, "AVIF", exif=exif)],
        "JPEG2000": [encoded(rgba, "JPEG2000"), encoded(rgb, "JPEG2000", irreversible=True, quality_layers=[20])],
    }  # fmt: skip


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """A file with some bytes changed, numbers blown up, or parts cut or doubled; damage in the header is likely."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(0, min(len(data), 400 if rng.random() < 0.6 else len(data))))
        kind = int(rng.integers(0, 6))
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1:
            data[at : at + 4] = rng.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"\0\0\x20\0", b"\0\x20\0\0"])
        elif kind == 2:
            data[at : at + int(rng.integers(1, 40))] = b""
        elif kind == 3:
            data[at:at] = data[at : at + int(rng.integers(1, 200))]
        elif kind == 4:
            data[at] = int(rng.integers(0, 256))
        else:
            del data[max(at, 8) :]
        data = data or bytearray(content[:1])
    return bytes(data)


def with_right_checksums(content: bytes) -> bytes:
    """A damaged PNG with the checksums of its chunks made right again, so that the damage reaches the decoder."""
    data, at = bytearray(content), 8
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        data[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4, "big") if end + 4 <= len(data) else b""
        at = end + 4
    return bytes(data)


def main(count: int, gigabytes: float) -> None:
    """Print counts by format, what else than DataError was raised, and the slowest file."""
    faulthandler.enable()
    files = seeds()
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    address_space = int(gigabytes * 2**30)
    with open("/proc/self/statm") as statm:
        address_space += int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    report: dict[str, dict[str, int]] = {}
    wrong: list[str] = []
    slowest = 0.0
    for format, contents in files.items():
        outcome = report[format] = {"right": 0, "refused": 0}
        for seed in range(count):
            rng = np.random.default_rng([seed, len(format), len(contents[0])])
            content = mutated(contents[seed % len(contents)], rng)
            file = held(with_right_checksums(content) if format == "PNG" and seed % 4 else content, f"{format}-{seed}")
            faulthandler.dump_traceback_later(60, exit=True)
            begin = time.process_time()
            for use in (picture_size, load_picture, load_mask):
                try:
                    use(file)
                    outcome["right"] += use is load_picture
                except DataError as error:
                    outcome["refused"] += use is load_picture
                    if file.name not in str(error) or "\n" in str(error):
                        wrong.append(f"{file.name}: {error}")
                    if isinstance(error.__cause__, MemoryError):
                        wrong.append(f"{file.name}: more than {gigabytes} GiB")
                except BaseException as error:
                    wrong.append(f"{file.name}: {use.__name__}: {type(error).__name__}: {error}")
            slowest = max(slowest, time.process_time() - begin)
    faulthandler.cancel_dump_traceback_later()
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - started) / 2**20
    print(json.dumps({"formats": report, "wrong": wrong, "peak_gib": peak, "slowest_seconds": slowest}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
