"""Pictures: one decoder with stated rules for every use."""
