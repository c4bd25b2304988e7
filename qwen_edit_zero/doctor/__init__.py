"""What is looked at before the first step: `qwen-edit-zero doctor`, and its quick part at every start of training."""
