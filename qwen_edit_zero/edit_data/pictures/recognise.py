"""Telling apart what is no picture of an accepted format, so that a refusal can say what to do."""

from __future__ import annotations

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000")

_TEXTS = (
    (b"<svg", "it is an SVG drawing, not a raster image"),
    (b"<?xml", "it is XML (an SVG drawing?), not a raster image"),
    (b"<!doctype html", "it is a web page, not a picture: the download failed"),
    (b"<html", "it is a web page, not a picture: the download failed"),
    (b"version https://git-lfs", "it is a Git LFS pointer: fetch the real file with `git lfs pull`"),
    (b"%pdf", "it is a PDF document, not a raster image"),
)
_CONVERT = "which is not read here; convert it to JPEG or PNG"
_SIGNATURES = (
    (b"\xff\x0a", f"it is a JPEG XL picture, {_CONVERT}"),
    (b"\x00\x00\x00\x0cJXL ", f"it is a JPEG XL picture, {_CONVERT}"),
    (b"8BPS", f"it is a Photoshop document, {_CONVERT}"),
    (b"\x76\x2f\x31\x01", f"it is an OpenEXR picture, {_CONVERT}"),
    (b"\x00\x00\x01\x00", f"it is a Windows icon, {_CONVERT}"),
    (b"\x1a\x45\xdf\xa3", "it is a video (Matroska, WebM), not a picture"),
    (b"PK\x03\x04", "it is a ZIP archive, not a picture"),
    (b"\x1f\x8b", "it is gzip data, not a picture"),
)
_HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_VIDEO = (b"isom", b"iso2", b"mp41", b"mp42", b"avc1", b"qt  ", b"M4V ")


def what_it_is(head: bytes) -> str:
    """The reason of a refusal, from the first 256 bytes of the file."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for start, reason in _TEXTS:
        if text.startswith(start):
            return reason
    for start, reason in _SIGNATURES:
        if head.startswith(start):
            return reason
    if head[4:8] == b"ftyp":
        if head[8:12] in _HEIF:
            return f"it is a HEIC picture (an iPhone's own format), {_CONVERT} (on the phone: Camera, Most Compatible)"
        if head[8:12] in _VIDEO:
            return "it is a video, not a picture"
    return f"it is no picture of an accepted format ({', '.join(FORMATS)}), or its header is damaged"
