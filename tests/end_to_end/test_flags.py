"""The command line's flags, frozen: a new one is added here on purpose or not at all."""

from dataclasses import fields

from deat.cli import Bench, Evaluate, Export, Import, List, Report, Resume, Train

TRAIN = """data model method epochs eps norm out overwrite resume inexact seed batch_size lr rate weight_decay
momentum init rules alpha gamma max_steps beta tau start persistent compact held_out val_attack watch
test_images baseline precision sync_bn engine device threads deterministic workers data_root download size
dry_run json"""
EVALUATE = """target data model attacks n eps norm alpha epoch cascade seed block precision engine device out
data_root size json"""
BENCH = """recipe methods seeds data model set budget_bp jobs parallel out data_root download json"""
REPORT = """runs out against sweep gallery no_figures device data_root json"""


def test_no_flag_appears_by_accident() -> None:
    assert [f.name for f in fields(Train)] == TRAIN.split()
    assert [f.name for f in fields(Evaluate)] == EVALUATE.split()
    assert [f.name for f in fields(Resume)] == ["run_folder", "method", "model", "inexact", "data_root", "json"]
    assert [f.name for f in fields(Import)] == ["file", "out"]
    assert [f.name for f in fields(Export)] == ["run_folder", "out", "epoch", "shard_size"]
    assert [f.name for f in fields(Bench)] == BENCH.split()
    assert [f.name for f in fields(Report)] == REPORT.split()
    assert [f.name for f in fields(List)] == ["kind", "json"]
