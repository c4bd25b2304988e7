"""The Qwen-Image-Edit models: loading, conditioning, flow matching and sampling."""
