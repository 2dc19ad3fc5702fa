"""Weights in files: what is written comes back, and what cannot be read says why."""

import json
import os
import pickle
import random
import stat
import struct

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrizations

from deat.errors import CheckpointError, UsageError
from deat.models import add_normalization, build_model, load_weights, save_weights
from deat.models import weights as weights_module
from deat.models.pt_files import read_pt_file
from deat.models.saved_normalization import format_normalization_note, split_normalization
from deat.models.weights import read_weights
from deat.utils.safetensors_files import encode_tensors, read_tensors

MEAN, STD = [0.4], [0.2]


class Tied(nn.Module):
    def __init__(self, tie=True):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        if tie:
            self.second.weight = self.first.weight


def small():
    return build_model("small", in_channels=1, image_size=8)


def same(a, b):
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


def header_of(file):
    raw = file.read_bytes()
    return json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])


def write_raw(file, header, data=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("make", [small, lambda: build_model("densenet121_12"), lambda: nn.BatchNorm2d(3)])
def test_what_is_saved_comes_back(make, file):
    model, other = make(), make()
    save_weights(model, file)
    load_weights(other, file)
    assert same(model, other)


@pytest.mark.parametrize("held", [b"years of work", b"PK\x03\x04"])
def test_file_that_is_no_weights_is_not_replaced(held, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_bytes(held)
    with pytest.raises(CheckpointError, match=r"notes\.txt exists.*choose another name"):
        save_weights(small(), notes)
    assert notes.read_bytes() == held


def test_weights_are_replaced_whatever_they_are_called_and_so_are_damaged_ones_and_empty_files(tmp_path):
    for name in ("weights", "weights.safetensors"):
        save_weights(small(), tmp_path / name)
        save_weights(model := small(), tmp_path / name)
        load_weights(other := small(), tmp_path / name)
        assert same(model, other)
    for name, held in (("weights.safetensors", b"half"), ("temporary", b"")):
        (tmp_path / name).write_bytes(held)
        save_weights(small(), tmp_path / name)


def test_tied_weights_are_written_once_and_stay_tied(file):
    model, other = Tied(), Tied()
    save_weights(model, file)
    assert header_of(file).keys() == {"__metadata__", "first.weight", "first.bias", "second.bias"}
    load_weights(other, file)
    assert same(model, other)
    assert other.first.weight is other.second.weight


def test_tied_weights_fill_an_untied_model(file):
    model, other = Tied(), Tied(tie=False)
    save_weights(model, file)
    load_weights(other, file)
    assert same(model, other)


def test_tied_weights_without_their_other_names_still_load(file):
    model, other = Tied(), Tied()
    state = {k: t for k, t in model.state_dict().items() if k != "first.weight"}
    safetensors.torch.save_file(state, file)
    load_weights(other, file)
    assert same(model, other)


def test_files_of_the_safetensors_package_go_both_ways(file):
    model, other = Tied(), Tied()
    safetensors.torch.save_model(model, str(file))
    load_weights(other, file)
    assert same(model, other)
    third = Tied()
    save_weights(other, file)
    safetensors.torch.load_model(third, str(file))
    assert same(third, other)


@pytest.mark.parametrize("parametrise", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrised_weights_come_back(parametrise, file):
    model, other = (nn.Sequential(parametrise(nn.Linear(3, 4))) for _ in range(2))
    save_weights(model, file)
    load_weights(other, file)
    assert same(model, other)
    assert torch.equal(model.eval()[0].weight, other.eval()[0].weight)


def test_channels_last_weights_keep_values_and_layout(file):
    model = small().to(memory_format=torch.channels_last)
    save_weights(model, file)
    plain, last = small(), small().to(memory_format=torch.channels_last)
    load_weights(plain, file)
    load_weights(last, file)
    assert same(model, plain)
    assert same(model, last)
    assert last[2].weight.is_contiguous(memory_format=torch.channels_last)


def test_overlapping_and_expanded_buffers_are_written_whole(file):
    def make(fill):
        model = nn.Module()
        base = torch.full((4,), fill)
        model.register_buffer("head", base[:2])
        model.register_buffer("tail", base[1:])
        model.register_buffer("wide", torch.full((1,), fill).expand(5).clone()[::2])
        return model

    model, other = make(1.0), make(2.0)
    save_weights(model, file)
    load_weights(other, file)
    assert same(model, other)


def test_a_parameter_may_be_called_pt(file):
    model, other = nn.ParameterDict({"pt": torch.ones(2)}), nn.ParameterDict({"pt": torch.zeros(2)})
    save_weights(model, file)
    load_weights(other, file)
    assert same(model, other)


def test_wrapped_model_saves_and_loads_without_the_wrapper_in_its_keys(file):
    model = small()
    save_weights(torch.compile(nn.DataParallel(model), backend="eager"), file)
    other = small()
    load_weights(torch.compile(other, backend="eager"), file)
    assert same(model, other)


def test_normalised_model_brings_its_normalisation(file):
    save_weights(add_normalization(small(), MEAN, STD), file)
    other = add_normalization(small(), [0.0], [1.0])
    load_weights(other, file)
    assert other.normalize.std.item() == pytest.approx(0.2)


@pytest.mark.parametrize("strict", [True, False])
def test_normalised_model_takes_bare_weights_and_keeps_its_normalisation(file, strict):
    model, other = small(), add_normalization(small(), MEAN, STD)
    save_weights(model, file)
    load_weights(other, file, strict=strict)
    assert same(model, other.net)
    assert other.normalize.mean.item() == pytest.approx(0.4)


@pytest.mark.promise("P79")
@pytest.mark.parametrize("strict", [True, False])
def test_bare_model_refuses_weights_of_a_normalised_one_with_what_to_do(file, strict):
    model, other = add_normalization(small(), MEAN, STD), small()
    before = {key: tensor.clone() for key, tensor in other.state_dict().items()}
    save_weights(model, file)
    with pytest.raises(CheckpointError, match=r"add_normalization\(model, mean=\[0\.4\], std=\[0\.2\]\)"):
        load_weights(other, file, strict=strict)
    assert all(torch.equal(before[key], tensor) for key, tensor in other.state_dict().items())
    load_weights(other, file, strict=strict, ignore_normalization=True)
    assert same(model.net, other)


@pytest.mark.promise("P79")
def test_normalisation_in_a_note_is_required_and_restored_too(file):
    model = small()
    file.write_bytes(encode_tensors(model.state_dict(), format_normalization_note({"mean": MEAN, "std": STD})))
    with pytest.raises(CheckpointError, match="add_normalization"):
        load_weights(small(), file)
    other = add_normalization(small(), [0.0], [1.0])
    load_weights(other, file, ignore_normalization=True)
    assert other.normalize.mean.item() == 0.0
    load_weights(other, file)
    assert other.normalize.mean.item() == pytest.approx(0.4)
    assert same(model, other.net)


@pytest.mark.promise("P79")
def test_network_whose_own_part_is_called_net_gets_the_advice_on_normalisation_too(file):
    model, other = add_normalization(small(), MEAN, STD), nn.ModuleDict({"net": small()})
    save_weights(model, file)
    with pytest.raises(CheckpointError, match="add_normalization"):
        load_weights(other, file)
    load_weights(wrapped := add_normalization(other, [0.0], [1.0]), file)
    assert same(model.net, other["net"])
    assert wrapped.normalize.mean.item() == pytest.approx(0.4)


def test_a_wrapper_of_your_own_with_the_same_names_is_loaded_as_it_is(file):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.normalize = nn.Linear(2, 2), nn.Module()
            for name in ("mean", "std"):
                self.normalize.register_buffer(name, torch.rand(1, 1, 1, 1))

    model, other = Own(), Own()
    save_weights(model, file)
    load_weights(other, file)
    assert same(model, other)


def test_a_user_model_with_a_net_of_its_own_is_not_renamed(file):
    def make():
        return nn.ModuleDict({"net": nn.Linear(2, 2), "normalize": nn.Linear(2, 2)})

    model, other = make(), make()
    save_weights(model, file)
    load_weights(other, file)
    assert same(model, other)
    wrapped = add_normalization(make(), MEAN, STD)
    load_weights(wrapped, file)
    assert same(model, wrapped.net)


def test_parts_of_a_network_s_own_that_are_called_net_and_normalize_keep_their_names(tmp_path):
    save_weights(nn.ModuleDict({"net": nn.Linear(2, 2), "normalize": nn.Linear(2, 2)}), tmp_path / "own.safetensors")
    tensors, normalization = split_normalization(read_tensors(tmp_path / "own.safetensors"))
    assert (sorted(tensors)[0], normalization) == ("net.bias", {})


@pytest.mark.parametrize("present", [("best", "last", "."), ("last", "."), (".",)])
def test_a_run_folder_gives_its_best_weights_first(tmp_path, present):
    kept = []
    for place in present:
        kept.append(small())
        save_weights(kept[-1], tmp_path / place / "model.safetensors")
    other = small()
    load_weights(other, str(tmp_path))
    assert same(other, kept[0])


def test_a_folder_without_weights_says_where_it_looked(tmp_path):
    with pytest.raises(CheckpointError, match=r"no weights in folder .*best/model\.safetensors"):
        load_weights(small(), tmp_path)


def test_a_missing_file_is_named(file):
    with pytest.raises(CheckpointError, match=r"no weights at .*model\.safetensors"):
        load_weights(small(), file)


@pytest.mark.parametrize("name", ["model.safetensors", "model"])
@pytest.mark.parametrize(
    "pickled", [lambda path: torch.save({}, path), lambda path: path.write_bytes(pickle.dumps({}))]
)
def test_a_pickle_under_another_name_is_refused(tmp_path, name, pickled):
    pickled(tmp_path / name)
    with pytest.raises(CheckpointError, match="looks like a pickle"):
        load_weights(small(), tmp_path / name)


@pytest.mark.parametrize("name", ["model.pt", "model.PTH", "model.ckpt"])
def test_weights_of_torch_are_loaded_by_their_name(tmp_path, name):
    model, other = small(), small()
    torch.save(model.state_dict(), tmp_path / name)
    load_weights(other, tmp_path / name)
    assert same(model, other)


@pytest.mark.promise("P58")
@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580])
@pytest.mark.parametrize("place", [8, 12])
def test_a_damaged_header_is_not_taken_for_a_pickle(file, length, place):
    save_weights(nn.Linear(3, 3), file)
    raw = file.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    held = bytearray(struct.pack("<Q", length) + raw[8:end].ljust(length) + raw[end:])
    file.write_bytes(held)
    load_weights(nn.Linear(3, 3), file)
    held[place] = 0xFF
    file.write_bytes(held)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_weights(nn.Linear(3, 3), file)


@pytest.mark.promise("P58")
@pytest.mark.parametrize("place", [-1, -1000, -20_000])
def test_another_bit_in_the_numbers_is_noticed(file, place):
    save_weights(small(), file)
    held = bytearray(file.read_bytes())
    held[place] ^= 1
    file.write_bytes(held)
    with pytest.raises(CheckpointError, match="is damaged: its numbers"):
        load_weights(small(), file)


@pytest.mark.promise("P58")
def test_a_file_without_a_hash_is_read_as_it_is(file):
    model, other = small(), small()
    safetensors.torch.save_file(model.state_dict(), file, {"format": "pt"})
    load_weights(other, file)
    assert same(model, other)


def test_nothing_in_a_pickle_runs(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    for name in ("m.safetensors", "m.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(CheckpointError):
            load_weights(small(), tmp_path / name)
    torch.save({"weight": Bomb()}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError):
        load_weights(small(), tmp_path / "m.pt")
    assert not (tmp_path / "ran").exists()


def test_weights_are_not_written_under_the_name_of_a_pickle(tmp_path):
    with pytest.raises(CheckpointError, match=r"end it in \.safetensors"):
        save_weights(small(), tmp_path / "model.pt")


def test_every_truncation_is_one_clean_error_and_leaves_the_model_alone(file):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save_weights(model, file)
    whole, before = file.read_bytes(), {k: t.clone() for k, t in other.state_dict().items()}
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"damaged.*download or write it again"):
            load_weights(other, file)
    assert all(torch.equal(before[k], t) for k, t in other.state_dict().items())


@pytest.mark.promise("P57")
@pytest.mark.parametrize(
    "header",
    [
        b"{" * 1000,
        b"not json",
        {"weight": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}},
        {"weight": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"weight": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}},
        {"weight": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}},
        {"weight": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}},
        {"__metadata__": {"weight": "weight"}},
        {"__metadata__": {"weight": ["bias"]}},
    ],
)
def test_a_hostile_header_is_one_clean_error(file, header):
    write_raw(file, header, bytes(8))
    with pytest.raises(CheckpointError):
        load_weights(nn.Linear(2, 2), file)


@pytest.mark.promise("P57")
def test_a_header_that_claims_to_be_huge_is_one_clean_error(file):
    file.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"damaged.*download or write it again"):
        load_weights(nn.Linear(2, 2), file)


@pytest.mark.promise("P57")
def test_keys_that_do_not_fit_are_named_up_to_five(file):
    save_weights(nn.Linear(2, 2), file)
    with pytest.raises(CheckpointError, match=r"missing: 0\.weight.* and 3 more; not in the model: bias, weight"):
        load_weights(small(), file)


def test_a_wrong_shape_is_named_with_both_shapes_even_when_not_strict(file):
    save_weights(build_model("small", 7, 1, 8), file)
    for strict in (True, False):
        with pytest.raises(
            CheckpointError, match=r"wrong shape: 7\.weight \(7, 256\) for \(10, 256\).*number of classes"
        ):
            load_weights(small(), file, strict=strict)


def test_loose_loading_skips_what_only_one_side_has(file):
    torch.manual_seed(0)
    model = nn.ModuleDict({"shared": nn.Linear(2, 2), "old": nn.Linear(2, 2)})
    other = nn.ModuleDict({"shared": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
    save_weights(model, file)
    with pytest.raises(CheckpointError, match=r"missing: new\.weight.*not in the model: old\.bias"):
        load_weights(other, file)
    assert not same(model["shared"], other["shared"])
    load_weights(other, file, strict=False)
    assert same(model["shared"], other["shared"])


def test_loose_loading_of_nothing_at_all_is_refused(file):
    save_weights(nn.Linear(2, 2), file)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_weights(small(), file, strict=False)


def test_state_that_is_not_a_tensor_is_refused(file):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(CheckpointError, match=r"more than tensors.*_extra_state"):
        save_weights(Extra(1, 1), file)


def test_lazy_layers_are_refused_with_what_to_run_first(file):
    with pytest.raises(CheckpointError, match="lazy layers"):
        save_weights(nn.LazyLinear(3), file)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_litter(file, monkeypatch):
    model = small()
    save_weights(model, file)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_module.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot write weights.*No space left"):
        save_weights(small(), file)
    assert os.listdir(file.parent) == [file.name]
    other = small()
    load_weights(other, file)
    assert same(model, other)


def test_writing_onto_a_folder_is_one_clean_error(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot write weights"):
        save_weights(small(), tmp_path / "model.safetensors")


def test_writing_below_a_file_is_one_clean_error(file):
    file.write_text("")
    with pytest.raises(CheckpointError, match="cannot write weights"):
        save_weights(small(), file / "model.safetensors")


def test_a_written_file_has_the_permissions_of_any_other(file, tmp_path):
    (tmp_path / "plain").write_text("")
    save_weights(small(), file)
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_saving_twice_gives_the_same_bytes(file, tmp_path):
    model = small()
    save_weights(model, file)
    save_weights(model, tmp_path / "again.safetensors")
    assert file.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_foreign_weights_lose_what_wrappers_put_before_their_names(prefix, tmp_path):
    own = small().state_dict()
    torch.save({f"{prefix}{name}": tensor for name, tensor in own.items()}, tmp_path / "w.pt")
    assert read_pt_file(tmp_path / "w.pt").tensors.keys() == own.keys()


def test_weights_of_a_part_that_was_compiled_have_its_own_names(tmp_path):
    torch.save({"a._orig_mod.weight": torch.ones(1), "b.weight": torch.ones(1)}, tmp_path / "w.pt")
    assert read_pt_file(tmp_path / "w.pt").tensors.keys() == {"a.weight", "b.weight"}


@pytest.mark.parametrize(
    ("taken", "other", "prefix"), [("state_dict", "state_dict_ema", ""), ("model", "ema", "module.")]
)
def test_of_several_weights_in_a_file_the_taken_ones_are_named(taken, other, prefix, tmp_path):
    ones, zeros = {"fc.weight": torch.ones(1)}, {f"{prefix}fc.weight": torch.zeros(1)}
    torch.save({"epoch": 3, "sizes": {"x": torch.ones(1)}, taken: ones, other: zeros}, tmp_path / "w.pt")
    with pytest.warns(UserWarning, match=f"under '{taken}' and under '{other}': those of '{taken}' are used"):
        assert read_pt_file(tmp_path / "w.pt").tensors["fc.weight"] == 1


@pytest.mark.parametrize("note", ["{", "[]", "[" * 100_000], ids=["not JSON", "a list", "deep"])
def test_note_of_another_user_s_is_passed_over(note, tmp_path):
    (tmp_path / "w.safetensors").write_bytes(encode_tensors({"a": torch.zeros(1)}, note))
    assert read_weights(tmp_path / "w.safetensors").normalization == {}


WRAPPERS = {
    "Lightning": lambda own: {"state_dict": prefixed("model.", own), "pytorch-lightning_version": "2.5"},
    "Lightning around DDP": lambda own: {
        "state_dict": prefixed("net.module.", own),
        "pytorch-lightning_version": "2.5",
    },
    "Accelerate": lambda own: prefixed("module.", own),
    "torch.compile in DDP": lambda own: prefixed("module._orig_mod.", own),
    "AveragedModel": lambda own: {"n_averaged": torch.tensor(7), **prefixed("module.", own)},
    "AveragedModel of a compiled one": lambda own: {
        "n_averaged": torch.tensor(7),
        **prefixed("module._orig_mod.", own),
    },
    "an average alone": lambda own: {"epoch": 3, "ema_weights": prefixed("module.", own)},
}


def prefixed(prefix, tensors):
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weights_from_inside_a_wrapper_get_the_network_s_own_names(wrapper, tmp_path):
    own = small().state_dict()
    torch.save(WRAPPERS[wrapper](own), tmp_path / "w.ckpt")
    found = read_pt_file(tmp_path / "w.ckpt").tensors
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) for name in own)


@pytest.mark.parametrize("saved", ["", "net.", "model.", "model.net.", "a.b.c."])
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("own", [None, "model", "net"])
def test_what_all_names_begin_with_does_not_count(saved, is_normalised, own, file):
    def wrapped(net):
        net = nn.ModuleDict({own: net}) if own else net
        return add_normalization(net, MEAN, STD) if is_normalised else net

    model, other = small(), wrapped(small())
    safetensors.torch.save_file(prefixed(saved, model.state_dict()), file)
    load_weights(other, file)
    inner = other.net if is_normalised else other
    assert same(model, inner[own] if own else inner)
    assert not is_normalised or other.normalize.mean.item() == pytest.approx(0.4)


@pytest.mark.promise("P79")
def test_normalised_network_inside_a_wrapper_brings_its_normalisation(file):
    model, other = add_normalization(small(), MEAN, STD), add_normalization(small(), [0.0], [1.0])
    safetensors.torch.save_file(prefixed("model.", model.state_dict()), file)
    load_weights(other, file)
    assert same(model, other)
    with pytest.raises(CheckpointError, match="add_normalization"):
        load_weights(small(), file)


def test_of_two_networks_in_one_file_neither_is_guessed(tmp_path):
    ours, theirs = small().state_dict(), small().state_dict()
    torch.save({**prefixed("student.", ours), **prefixed("teacher.module.", theirs)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"'student\.' or 'teacher\.module\.' fit.*--part student\."):
        load_weights(small(), tmp_path / "w.pt")
    found = read_pt_file(tmp_path / "w.pt", "teacher.module.").tensors
    assert all(torch.equal(found[name], theirs[name]) for name in theirs)
    with pytest.raises(UsageError, match=r"no part 'techer'.*'student\.' \(8\), 'teacher\.' \(8\)"):
        read_pt_file(tmp_path / "w.pt", "techer")


def test_of_two_weights_under_keys_of_other_names_neither_is_guessed(tmp_path):
    one, two = {"fc.weight": torch.ones(1)}, {"fc.weight": torch.zeros(1)}
    torch.save({"online": one, "ema": two, "epoch": 3}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"under 'online', 'ema': choose with deat import w\.pt --part"):
        read_pt_file(tmp_path / "w.pt")
    assert read_pt_file(tmp_path / "w.pt", "ema").tensors["fc.weight"] == 0


def mutated(data, draw):
    """Other bytes at a random place: a bit, a byte, a block, a cut, two blocks swapped."""
    raw, place = bytearray(data), draw.randrange(len(data))
    other = draw.randrange(len(data))
    kind = draw.choice(["bit", "byte", "block", "cut", "swap"])
    if kind == "bit":
        raw[place] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        raw[place] = draw.randrange(256)
    elif kind == "block":
        raw[place : place + 64] = draw.randbytes(64)
    elif kind == "cut":
        del raw[place : place + draw.randrange(1, 64)]
    else:
        raw[place : place + 16], raw[other : other + 16] = raw[other : other + 16], raw[place : place + 16]
    return bytes(raw)


@pytest.mark.promise("P80")
def test_no_damaged_file_of_torch_s_is_read_as_other_weights(tmp_path):
    own, draw, refused = small().state_dict(), random.Random(0), 0
    torch.save(own, tmp_path / "w.pt")
    whole = (tmp_path / "w.pt").read_bytes()
    for _ in range(200):
        (tmp_path / "w.pt").write_bytes(mutated(whole, draw))
        try:
            found = read_pt_file(tmp_path / "w.pt").tensors
        except CheckpointError:
            refused += 1
        else:  # the damage was between the parts of the archive
            assert found.keys() == own.keys()
            assert all(torch.equal(found[name], own[name]) for name in own)
    assert refused > 150


@pytest.mark.promise("P80")
@pytest.mark.parametrize("old", [True, False], ids=["before torch 1.6", "written without checksums"])
def test_file_without_checksums_is_reported_to_be_one(old, tmp_path):
    own = small().state_dict()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(own, tmp_path / "w.pt", _use_new_zipfile_serialization=not old)
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.warns(UserWarning, match=r"w\.pt has no checksums, so that damage in it cannot be seen"):
        assert read_pt_file(tmp_path / "w.pt").tensors.keys() == own.keys()
