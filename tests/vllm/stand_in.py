"""Stands in for the GPU that vLLM expects: a pytest plugin (``-p``), imported before vLLM."""

import os

import torch

# vLLM's own switch for its CPU platform; a local folder stands in for the hub.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

torch.accelerator.current_device_index = lambda: 0  # type: ignore[method-assign]
