"""Builds, packing and unpacking on a GPU; nothing of CUDA is imported before one is asked for."""

from kvcompile.device.build import DeviceDescriptors, build, build_on, pack, pack_on, warm, warmup

__all__ = ["DeviceDescriptors", "build", "build_on", "pack", "pack_on", "warm", "warmup"]
