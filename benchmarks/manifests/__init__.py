"""Opening manifests of up to ten million rows, beside Hugging Face datasets."""
