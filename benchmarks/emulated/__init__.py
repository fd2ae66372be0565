"""The parts that all benchmarks on emulated hosts share, from the launch to the rows."""
