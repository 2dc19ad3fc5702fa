"""The M+ rule replayed on the authors' own logs gives the authors' k in every epoch."""

import deat
from deat.attack_schedules import GradientMagnitude
from deat.core.epoch_sums import EpochRecord

M_DEAT_PREACT = """
5824.9 2829.7 2977.4 2693.9 2784.9 2880.7 2968.2 3028.7 2844.7 2850.9 2852.3 2886.0 2900.5 2939.9 2947.2 2952.1
2965.2 2992.3 2995.8 3013.8 3008.6 3024.5 3031.6 3046.8 3053.9 3035.4 3189.2 3203.4 3236.2 3151.5 3139.6 3155.5
3171.9 3199.4 3212.8 3211.4 3205.0 3223.7 3238.0 3256.9 3253.6 3303.1 3326.6 3346.0 3300.1 3315.5 3335.8 3344.5
3341.3 3367.9
"""
M_PGD_DENSENET = """
0 1405.9 1277.7 1312.7 1345.7 1371.5 1394.5 1412.3 1426.4 1644.8 1787.3 1913.5 1967.3 2010.3 2041.9
"""
RULE = GradientMagnitude(gamma=1.01, max_steps=7, alpha=10 / 255)


def replay(schedule, magnitudes: list[float]) -> list[int]:
    """k in every epoch of the log, and after it."""
    state, ks = schedule.init(), []
    for epoch, magnitude in enumerate(magnitudes):
        ks.append(schedule.budget(state, epoch).k)
        state = schedule.observe(state, EpochRecord(epoch, 1.0, 0.5, magnitude, 50_000))
    return [*ks, schedule.budget(state, len(magnitudes)).k]


def runs(*pairs: tuple[int, int]) -> list[int]:
    """A list from (value, times) pairs."""
    return [value for value, times in pairs for _ in range(times)]


def series(text: str) -> list[float]:
    return [float(number) for number in text.split()]


def test_m_deat_of_the_preact_log_has_the_authors_replays_in_every_epoch():
    replays = [k + 1 for k in replay(RULE, series(M_DEAT_PREACT))[:-1]]
    assert replays == runs((1, 1), (2, 2), (3, 5), (4, 19), (5, 2), (6, 13), (7, 2), (8, 6))
    assert sum(replays) == 246


def test_m_pgd_of_the_densenet_log_has_the_authors_k_in_every_epoch():
    ks = replay(RULE, series(M_PGD_DENSENET))
    assert ks == runs((0, 1), (1, 8), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 2))
    to_the_end = ks + [7] * (50 - len(ks))  # k is at its cap, whatever the rest of the log says
    assert sum(k + 1 for k in to_the_end) == 330


def test_the_registered_methods_hold_the_rule_of_the_logs():
    bound = deat.get_method("m+deat").bind(deat.Linf(8 / 255), 50)
    assert bound == RULE
    released = deat.get_method("m+fgsm", rules="released").bind(deat.Linf(8 / 255), 50)
    assert replay(released, series(M_PGD_DENSENET)) == replay(RULE, series(M_PGD_DENSENET))


def test_released_m_pgd_ramps_to_4_whatever_the_magnitude_says_and_stays():
    schedule = deat.get_method("m+pgd", rules="released").bind(deat.Linf(8 / 255), 50)
    falling = [0.0, *(1000.0 - t for t in range(49))]
    assert replay(schedule, falling)[:-1] == runs((0, 1), (1, 2), (2, 1), (3, 1), (4, 45))


def test_released_m_trades_and_m_mart_ramp_to_4_and_then_follow_the_magnitude_up_to_10():
    for name in ("m+trades", "m+mart"):
        schedule = deat.get_method(name, rules="released").bind(deat.Linf(8 / 255), 50)
        grown = [1.02**t for t in range(50)]
        assert replay(schedule, [10.0] * 50) == runs((0, 1), (1, 2), (2, 1), (3, 1), (4, 46))
        assert replay(schedule, grown) == runs((0, 1), (1, 2), *((k, 1) for k in range(2, 10)), (10, 40))


def test_without_the_ramp_a_falling_magnitude_keeps_k_at_1():
    schedule = deat.get_method("m+pgd").bind(deat.Linf(8 / 255), 50)
    falling = [0.0, *(1000.0 - t for t in range(49))]
    assert replay(schedule, falling)[:-1] == runs((0, 1), (1, 49))
