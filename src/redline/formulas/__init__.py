"""Pure arithmetic on model shapes: parameters, FLOPs, memory. No torch, no files, no state."""
