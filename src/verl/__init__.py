"""RL post-training for language models. Nothing heavy is imported here: `import verl` takes milliseconds."""

__version__ = "0.1.0"
