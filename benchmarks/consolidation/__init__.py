"""Consolidation of folders that DeepSpeed and torch wrote, against the tools that come with them and against cp."""
