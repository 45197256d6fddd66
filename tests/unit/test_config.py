"""Configs: one clear error with the full key, and every shipped file loads."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from apps.grpo.main import main
from forge_trainer.config import (
    AlgorithmConfig,
    GeneratorConfig,
    GrpoConfig,
    ProfilingConfig,
    TaskConfig,
    TrainerConfig,
    WeightsConfig,
)
from forge_trainer.config.load import dump_config, load_config
from forge_trainer.controller.checks import (
    check_algorithm,
    check_generator,
    check_generator_fits_model,
    check_models,
    check_prompts,
    check_tokenizer_fits_model,
    check_trainer,
    check_trainer_fits_model,
    require_writable,
)
from forge_trainer.data.prompts import make_task
from forge_trainer.errors import ConfigError, DataError
from forge_trainer.hf import find_model_dir, read_model_facts
from forge_trainer.run.run_folder import refuse_places_of_the_run
from forge_trainer.types import SamplingParams

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text("run: {folder: out, steps: 3}\nmodel: {tiny: {}}\n")
    return file


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_loads_and_says_how_to_run_it(path: Path) -> None:
    load_config(GrpoConfig, path)
    assert path.read_text().startswith(
        f"# uv run python -m apps.grpo.main --config configs/{path.name}"
    )


def test_overrides_win_and_the_dump_loads_back(config_file: Path, tmp_path: Path) -> None:
    config = load_config(
        GrpoConfig, config_file, ["--trainer.optimizer.lr", "1e-3", "--run.steps=7"]
    )
    assert (config.trainer.optimizer.lr, config.run.steps) == (1e-3, 7)
    dump_config(config, tmp_path / "dump.yaml")
    assert load_config(GrpoConfig, tmp_path / "dump.yaml") == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--trainer.optimizer.lrr", "1"], r"trainer.optimizer.lrr: no such key.*optimizer.lr\?"),
        (["--trainer.optimizer.lr", "fast"], "trainer.optimizer.lr: got 'fast'; input should be"),
        (["--algorithm.group_size", "1"], "algorithm.group_size: got '1'; .*greater than or"),
        (["--run.steps", "0"], "run.steps: got '0'"),
        (["--trainer.num_ranks", "300"], "256 episodes cannot fill trainer.num_ranks: 300"),
        (["--trainer.num_ranks", "3", "--trainer.parallel.tensor", "2"], "num_ranks=3 is not a"),
        (["--trainer.engine", "local", "--trainer.num_ranks", "2"], "runs on one rank, got"),
        (["--generator.max_prompt_tokens", "999"], "exceed model.tiny.max_sequence_tokens=256"),
        (["--generator.kv_cache", "keep"], "kv_cache: keep, but update is drain, so nothing runs"),
        (["--generator.tensor_parallel", "2"], "tensor_parallel: 2, but backend is transformers"),
        (["--generator.stop", '[""]'], "generator.stop.0: got ''"),
        (["--trainer.packing.max_row_tokens", "9"], "exceed trainer.packing.max_row_tokens=9"),
        (["--model.path", "x"], "model: give exactly one of path and tiny, got both"),
        (["--model.tiny.num_kv_heads", "3"], "num_kv_heads=3 does not divide num_heads=4"),
        (["--trainer.lr_schedule.decay_steps", "5"], "decay_steps needs total_steps"),
        (["stray"], "command line: .*stray"),
        (["--run.steps"], "command line: .*expected one argument"),
    ],
)
def test_what_cannot_work_is_one_config_error(
    config_file: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(GrpoConfig, config_file, overrides)


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_sampling_from_a_part_of_the_vocabulary_is_refused_with_the_reason(
    config_file: Path, name: str
) -> None:
    """In a file, on the command line and in code; not only as a key that does not exist."""
    options: dict[str, Any] = {name: 0.9}
    why = f"{name} is refused: .*part of the vocabulary.*importance ratio would be wrong"
    with pytest.raises(ConfigError, match=f"generator.{why}"):
        load_config(GrpoConfig, config_file, [f"--generator.{name}", "0.9"])
    config_file.write_text(config_file.read_text() + f"generator: {{{name}: 0.9}}\n")
    with pytest.raises(ConfigError, match=f"generator: {why}"):
        load_config(GrpoConfig, config_file)
    with pytest.raises(DataError, match=why):
        SamplingParams(max_completion_tokens=4, **options)


def test_unknown_keys_in_the_file_are_named_with_their_path(config_file: Path) -> None:
    config_file.write_text("run: {folder: out, steps: 3, sped: 1}\nmodel: {tiny: {heads: 2}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(GrpoConfig, config_file)
    assert "run.sped: no such key, got 1" in str(caught.value)
    assert "model.tiny.heads: no such key, got 2" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("run: [", "is not YAML"), ("- 1", "must hold a mapping, got list"), ("", "run: is required")],
)
def test_files_that_are_no_config_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(GrpoConfig, file)
    with pytest.raises(ConfigError, match="cannot read config file"):
        load_config(GrpoConfig, tmp_path / "missing.yaml")


def test_the_app_answers_a_config_error_with_exit_code_2(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(config_file), "--run.steps", "-1"]) == 2
    assert "ConfigError" in capsys.readouterr().err
    assert main([]) == 2
    assert "--config is missing" in capsys.readouterr().err
    given = ["--config", str(config_file), "--task.name", "reading"]
    assert main(given) == 2
    assert "task.name: 'reading' is unknown" in capsys.readouterr().err


def test_a_run_folder_is_refused_unless_it_may_be_overwritten(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    given = ["--config", str(config_file), "--run.folder", str(folder)]
    assert main([*given, "--overwrite"]) == 2
    assert "holds no run" in capsys.readouterr().err
    (folder / "run_config.yaml").write_text("")
    assert main(given) == 2
    assert "holds an earlier run; give --overwrite" in capsys.readouterr().err
    assert (folder / "thesis.txt").exists()
    assert main(["--config", str(config_file), "--run.folder", str(config_file)]) == 2
    assert "is a file" in capsys.readouterr().err
    assert main(["--config", str(config_file), "--run.folder", "/proc/nowhere"]) == 2
    assert "cannot write to /proc/nowhere" in capsys.readouterr().err


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    """A real GPT-2 config calls its heads n_head; it used to fail on that name."""
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is a 'gpt2' model; .* supports llama, qwen3"):
        check_trainer(tmp_path, TrainerConfig())
    local = TrainerConfig(engine="local")
    with pytest.raises(ConfigError, match=r"no \*.safetensors file"):
        check_trainer(tmp_path, local)
    facts = read_model_facts(tmp_path)
    assert (facts.num_heads, facts.num_layers, facts.max_sequence_tokens) == (12, 12, 1024)
    check_trainer_fits_model(local, facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "sets attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported for qwen3"),
        ({"rms_norm_eps": None}, "config.json lacks rms_norm_eps"),
    ],
    ids=["bias", "activation", "rope", "missing"],
)
def test_what_the_titan_engine_lacks_is_refused_before_anything_starts(
    tiny_qwen3: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    config = json.loads((tiny_qwen3 / "config.json").read_text()) | change
    kept = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ConfigError, match=message):
        check_trainer(tmp_path, TrainerConfig())


def test_a_refused_config_leaves_the_earlier_run_as_it_was(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--overwrite used to delete first and check then."""
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    for name in ("run_config.yaml", "metrics.jsonl", "model/config.json"):
        (folder / name).write_text("{}")
    given = ["--config", str(config_file), "--run.folder", str(folder), "--overwrite"]
    assert main([*given, "--algorithm.loss_options", '{"ratio_hi": 1}']) == 2
    assert "has no option ['ratio_hi']" in capsys.readouterr().err
    assert main([*given, "--generator.max_prompt_tokens", "250"]) == 2
    assert main([*given, "--task.reward", "os:path"]) == 2
    assert "not a function" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").exists()


def test_a_model_inside_the_folder_to_be_emptied_is_kept(
    tiny_qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny_qwen3, folder / "model")
    (folder / "run_config.yaml").write_text("")
    file = tmp_path / "config.yaml"
    values = {
        "run": {"folder": str(folder), "steps": 1, "overwrite": True},
        "model": {"path": str(folder / "model")},
        "generator": {"max_prompt_tokens": 8},
    }
    file.write_text(json.dumps(values))
    assert main(["--config", str(file)]) == 2
    assert "the model of this run, and would be emptied" in capsys.readouterr().err
    assert (folder / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_coef": -0.1}, "kl_coef is -0.1"),
        ({"ratio_low": -3.0}, "ratio_low is -3.0"),
        ({"ratio_low": "wide"}, "ratio_low is 'wide'"),
        ({"ratio_low": 1.3, "ratio_high": 1.2}, "ratio_low=1.3 and ratio_high=1.2 must have 1"),
        ({"ratio_high": 0.9}, "ratio_low=0.8 and ratio_high=0.9 must have 1"),
        ({"correction": "tis", "weight_cap": 0.5}, "weight_cap is 0.5"),
    ],
)
def test_loss_options_are_checked_before_anything_starts(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.loss_options: .*{message}"):
        check_algorithm(AlgorithmConfig(loss_options=options))


@pytest.mark.parametrize(
    ("trainer", "weights", "message"),
    [
        ({"checkpoint_folder": "/proc/y"}, {}, "trainer.checkpoint_folder: cannot write to /proc"),
        (
            {"profiling": {"folder": "/proc/y", "trace_steps": [1]}},
            {},
            "trainer.profiling.folder: cannot write to /proc/y",
        ),
        ({}, {"shared_memory_folder": "/no/such"}, "weights.shared_memory_folder: /no/such does"),
    ],
)
def test_folders_that_cannot_be_had_are_refused(
    tiny_qwen3: Path, trainer: dict[str, Any], weights: dict[str, Any], message: str
) -> None:
    """Under transport auto, a folder asked for by name was passed over."""
    config = TrainerConfig.model_validate({"device": "cpu", **trainer})
    with pytest.raises(ConfigError, match=message):
        check_models(tiny_qwen3, [config], GeneratorConfig(), WeightsConfig(**weights))


def test_a_look_at_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    require_writable("key", str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--generator.temperature", "1e-4"], "generator.temperature: got"),
        (["--trainer.optimizer.betas", "[0.9,1.0]"], "trainer.optimizer.betas.1: got"),
        (["--run.seed", "18446744073709551616"], "run.seed: got"),
        (["--trainer.collective_timeout_s", "1e14"], "trainer.collective_timeout_s: got"),
        (
            ["--trainer.init_timeout_s=59"],
            "init_timeout_s=59 must not be less than collective_timeout_s=60",
        ),
        (
            ["--trainer.collective_timeout_s=601"],
            "init_timeout_s=600 must not be less than collective_timeout_s=601",
        ),
        (
            ["--trainer.stall_timeout_s=59"],
            "stall_timeout_s=59 must not be less than collective_timeout_s=60",
        ),
        (["--run.folder", "~/x"], "run.folder: got '~/x'; give a whole path; ~ is not expanded"),
        (
            ["--trainer.optimizer.param_groups", '[{"pattern":"norm"}]'],
            "has neither lr nor weight_decay",
        ),
        (["--trainer.optimizer.param_groups", '[{"pattern":"(","lr":1}]'], "no regular expression"),
        (
            [
                "--trainer.lr_schedule.total_steps=100",
                "--trainer.lr_schedule.decay_steps=50",
                "--run.steps=240",
            ],
            "the last 140 updates would have a learning rate of 0",
        ),
        (
            ["--trainer.lr_schedule.warmup_steps", "5000"],
            "so the rate would never reach optimizer.lr; give at most 3",
        ),
        (["--trainer.lr_schedule.decay_type", "cosine"], "need decay_steps and total_steps"),
        (
            [
                "--trainer.engine=local",
                '--algorithm.loss_options={"kl_coef":0.1}',
                "--reference.num_ranks=2",
            ],
            "reference: engine 'local' runs on one rank, got num_ranks=2",
        ),
        (
            ["--trainer.profiling.folder=p", "--trainer.profiling.trace_steps=[500]"],
            "trainer.profiling: step 500 is beyond run.steps=3",
        ),
        (["--async.max_staleness=-1"], "async.max_staleness"),
        (["--async.staleness=1"], "async.staleness: no such key"),
        (
            ["--weights.transport=torchstore", "--weights.shared_memory_folder=/dev/shm"],
            "but transport is torchstore; leave one of them out",
        ),
        (['--trainer.compile=["loss"]', "--algorithm.loss=a.b:c"], "compiles registered losses"),
        (["--algorithm.loss=cross_entropy"], "use one of .*grpo.* or 'package.module:name'"),
    ],
)
def test_what_could_only_fail_later_or_be_ignored_is_refused(
    config_file: Path, overrides: list[str], message: str
) -> None:
    """All of these once started a run."""
    with pytest.raises(ConfigError, match=message):
        load_config(GrpoConfig, config_file, overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {folder: out, steps: 3}\nrun: {folder: b, steps: 4}\n", "run is given twice, in li"),
        ("run: {folder: out, steps: yes}\nmodel: {tiny: {}}\n", "steps is True; a number is want"),
    ],
)
def test_yaml_that_says_two_things_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(GrpoConfig, file)


def test_prompts_must_fit_and_none_is_lost(tiny_qwen3: Path) -> None:
    task = make_task(TaskConfig(), seed=0)
    with pytest.raises(
        ConfigError, match=r"generator.max_prompt_tokens: 2, but .* has 4 tokens: '"
    ):
        check_prompts(task, tiny_qwen3, GeneratorConfig(max_prompt_tokens=2))
    fresh = make_task(TaskConfig(), seed=0)
    checked = check_prompts(fresh, tiny_qwen3, GeneratorConfig(max_prompt_tokens=4))
    same = make_task(TaskConfig(), seed=0)
    for found, wanted in itertools.islice(zip(checked.prompts, same.prompts, strict=True), 600):
        assert found == wanted


def test_a_reasoning_gym_task_that_makes_no_prompt_is_refused() -> None:
    config = TaskConfig(name="reasoning_gym/chain_sum", options={"min_terms": 2.5})
    with pytest.raises(ConfigError, match="cannot make 'chain_sum' with {'min_terms': 2.5}: "):
        make_task(config, seed=0)


@pytest.mark.parametrize("reward", ["builtins:len", "os:getcwd"])
def test_a_reward_that_cannot_be_called_is_refused(reward: str) -> None:
    with pytest.raises(ConfigError, match="cannot be called with"):
        make_task(TaskConfig(reward=reward), seed=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("pointer", "is no whole safetensors file .*; fetch it again"),
        ("index", r"lacks 1 tensors of its index, such as \['gone'\]; the download is incomplete"),
        ("none", "has no .*safetensors file"),
    ],
)
def test_a_model_that_was_fetched_in_part_is_refused(
    tiny_qwen3: Path, tmp_path: Path, damage: str, message: str
) -> None:
    model_dir = Path(shutil.copytree(tiny_qwen3, tmp_path / "model"))
    weights = model_dir / "model.safetensors"
    if damage == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif damage == "index":
        index = {"weight_map": {"gone": "model-2.safetensors"}}
        (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        weights.unlink()
    with pytest.raises(ConfigError, match=message):
        check_trainer(model_dir, TrainerConfig(device="cpu"))


def test_folders_that_the_run_writes_itself_are_refused(config_file: Path) -> None:
    config = load_config(GrpoConfig, config_file, ["--trainer.checkpoint_folder", "out/final/x"])
    message = "trainer.checkpoint_folder: out/final/x is where the run writes its final; choose"
    with pytest.raises(ConfigError, match=message):
        refuse_places_of_the_run(config)
    for folder in ("out/checkpoints", "elsewhere"):
        given = ["--trainer.checkpoint_folder", folder]
        refuse_places_of_the_run(load_config(GrpoConfig, config_file, given))


def test_the_layout_must_fit_the_model(tiny_qwen3: Path) -> None:
    facts = read_model_facts(tiny_qwen3)
    for parallel, message in (
        ({"tensor": 4}, "tensor: 4 does not divide the model's 2 key-value heads"),
        ({"pipeline": 4}, "pipeline: 4 stages for the model's 2 layers"),
        ({"pipeline": 2}, "pipeline: 2, but the model ties its embeddings"),
    ):
        trainer = TrainerConfig.model_validate({"num_ranks": 4, "parallel": parallel})
        with pytest.raises(ConfigError, match=f"trainer.parallel.{message}"):
            check_trainer_fits_model(trainer, facts)
    with pytest.raises(ConfigError, match="max_sequence_tokens: 65 exceeds .*=64"):
        check_trainer_fits_model(TrainerConfig(max_sequence_tokens=65), facts)
    generator = GrpoConfig.model_validate(
        {"run": {"folder": "x", "steps": 1}, "model": {"path": "x"}}
    ).generator
    with pytest.raises(ConfigError, match="144 exceed the model's max_position_embeddings=64"):
        check_generator_fits_model(generator, facts)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sliding_window": 16}, "sliding_attention of 16 tokens"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"sliding_window": 16, "use_sliding_window": False}, None),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": None}, None),
    ],
)
def test_layers_that_do_not_see_all_earlier_tokens_are_refused_before_anything_starts(
    tiny_llama: Path, tmp_path: Path, given: dict[str, Any], told: str | None
) -> None:
    """Sampled in slots, they would give wrong log-probs once a row is longer than the window."""
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **given}))
    generator = GeneratorConfig(max_prompt_tokens=8, device="cpu")
    refused = pytest.raises(ConfigError, match=f"attend to all earlier tokens, .* has {told};")
    with contextlib.nullcontext() if told is None else refused:
        check_generator(tmp_path, generator)


def test_a_tokenizer_of_another_model_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_qwen3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    facts = read_model_facts(tmp_path)
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        check_tokenizer_fits_model(tmp_path, facts)
    (tmp_path / "tokenizer.json").write_text((tiny_qwen3 / "tokenizer.json").read_text())
    with pytest.raises(ConfigError, match="token ids up to 259, the model has .* vocab_size=100"):
        check_tokenizer_fits_model(tmp_path, facts)
    own = read_model_facts(tiny_qwen3)
    with pytest.raises(ConfigError, match="has no tokenizer_config.json, without which"):
        check_tokenizer_fits_model(tmp_path, own)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither a padding nor an end-of-sequence token"):
        check_tokenizer_fits_model(tmp_path, own)


def test_models_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        find_model_dir("./nowhere")
    with pytest.raises(ConfigError, match="cannot read .*config.json"):
        check_trainer(tmp_path, TrainerConfig())


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"parallel": {"context": 2}}, "context parallelism is not supported"),
        ({"parallel": {"expert": 2}}, "expert parallelism splits the experts of an MoE model"),
        ({"engine": "local", "compile": ["model"]}, "engine 'local' has no compile"),
        ({"engine": "local", "float8": "emulated"}, "engine 'local' has no float8"),
        ({"profiling": {"trace_steps": [1]}}, "profiling.folder is missing"),
        (
            {"num_ranks": 2, "parallel": {"pipeline": 2}, "defer_gradient_reduction": True},
            "defer_gradient_reduction is for layouts without a pipeline",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name(
    trainer: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig.model_validate(trainer)


def test_float8_names_what_is_missing(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainerConfig(device="cpu", float8="rowwise")
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="float8: 'rowwise' needs torchao; install it with"):
            check_trainer(tiny_qwen3, config)
        patched.setattr("importlib.util.find_spec", lambda name: object())
        with pytest.raises(ConfigError, match="needs a GPU of compute capability 8.9 .* got cpu"):
            check_trainer(tiny_qwen3, config)


def test_memory_snapshots_need_a_gpu(tiny_qwen3: Path) -> None:
    profiling = ProfilingConfig(folder="x", memory_steps=[1])
    config = TrainerConfig(device="cpu", profiling=profiling)
    with pytest.raises(ConfigError, match="memory_steps: .* on CUDA only, .* device is cpu"):
        check_trainer(tiny_qwen3, config)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("vllm", "'vllm' is unknown; use one of .'local', 'titan'."),
        ("no_such_package:Engine", "cannot be imported: No module named 'no_such_package'"),
        ("tests.data:NoEngine", "cannot be imported"),
        ("forge_trainer.types:PER_TOKEN_FIELDS", "is a tuple"),
    ],
)
def test_engines_that_are_not_there_are_refused(
    tiny_qwen3: Path, engine: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"trainer.engine: .*{message}"):
        check_trainer(tiny_qwen3, TrainerConfig(device="cpu", engine=engine))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": {"epochs": 2}}, "run.steps=3 is not a multiple of .* = 2 updates"),
        ({"algorithm": {"minibatches": 7}}, "minibatches=7 cannot share .* 256 episodes"),
        ({"trainer": {"trainable": False}}, "trainer.trainable is false"),
    ],
)
def test_batches_and_updates_must_fit(values: dict[str, object], message: str) -> None:
    base = {"run": {"folder": "x", "steps": 3}, "model": {"path": "x"}}
    with pytest.raises(ValueError, match=message):
        GrpoConfig.model_validate(base | values)


def test_the_reference_model_is_never_trained_and_has_a_port_of_its_own() -> None:
    values = {
        "run": {"folder": "x", "steps": 3},
        "model": {"path": "x"},
        "trainer": {"num_ranks": 2, "master_port": 29500},
    }
    config = GrpoConfig.model_validate(values)
    assert not config.needs_reference
    reference = config.reference_trainer
    assert (reference.num_ranks, reference.master_port, reference.trainable) == (2, None, False)
    values |= {"reference": {"num_ranks": 1}, "algorithm": {"loss_options": {"kl_coef": 0.1}}}
    config = GrpoConfig.model_validate(values)
    assert config.needs_reference
    assert (config.reference_trainer.num_ranks, config.reference_trainer.trainable) == (1, False)
