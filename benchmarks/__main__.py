"""Run every CPU benchmark: `python -m benchmarks`."""

from __future__ import annotations

from benchmarks import bench_generate, bench_traffic

if __name__ == "__main__":
    bench_generate.main()
    bench_traffic.main()
