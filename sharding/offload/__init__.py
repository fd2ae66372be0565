"""CPU offload: a step whose blocks live in host memory and are streamed through the device."""
