"""The rates behind --measure are those of real products and copies."""

from redline.cli.doctor_measure import measure_copy


def test_copy_rate_is_plausible() -> None:
    """Between a tenth of a GB/s (a very busy core) and what no CPU's memory or cache reaches."""
    assert 1e8 < measure_copy("cpu", 0.05, 1 << 22) < 1e13
