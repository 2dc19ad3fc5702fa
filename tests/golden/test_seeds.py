"""The seeds that every draw derives from: another value here is another run for everybody."""

from deat.utils.seeding import derive_seed


def test_seed_of_a_draw_is_what_it_always_was() -> None:
    assert (derive_seed(0, "start", 3, 7), derive_seed(1, "init")) == (3368654367158518892, 4163918198631969938)


def test_draws_of_other_places_have_other_seeds() -> None:
    places = [(0, "start", 1, 23), (0, "start", 12, 3), (0, "start", 123), (0, "dropout", 1, 23), (1, "start", 1, 23)]
    assert len({derive_seed(*place) for place in places}) == len(places)
