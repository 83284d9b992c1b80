import torch
from conftest import tiny_config
from test_gpt import V, random_tokens

from model.gpt import GPT
from training.config import QKNormConfig, TrainConfig
from training.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors, parameter_groups


def new_model(config: TrainConfig) -> GPT:
    model = GPT(config, V)
    model.init_weights(0)
    return model


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(random_tokens(4, 16, seed=step), random_tokens(4, 16, seed=step + 100))[1].backward()
        optimizer.step()
        optimizer.zero_grad()


def test_matrices_decay_and_vectors_do_not(qk_norm: QKNormConfig) -> None:
    model = new_model(tiny_config(qk_norm, bias=True))
    decay, rest = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert decay["weight_decay"] == 0.1 and rest["weight_decay"] == 0.0
    decayed = {names[id(p)] for p in decay["params"]}  # type: ignore[attr-defined]
    kept = {names[id(p)] for p in rest["params"]}  # type: ignore[attr-defined]
    assert decayed | kept == set(names.values()) and not decayed & kept
    assert all(name.endswith("weight") and "ln_" not in name for name in decayed)
    assert all(name.endswith(("bias", "gain", "raw")) or "ln_" in name for name in kept)


def test_updates_equal_adamw_written_out() -> None:
    """Decoupled weight decay, Loshchilov and Hutter, algorithm 2, in float64."""
    config = tiny_config()
    model = new_model(config).double()
    optimizer = build_optimizer(model, config)
    o, name = config.optim, "transformer.h.0.mlp.c_fc.weight"
    w = model.get_parameter(name).detach().clone()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, 6):
        model(random_tokens(4, 16, seed=t), random_tokens(4, 16, seed=t + 100))[1].backward()
        g = model.get_parameter(name).grad
        assert g is not None
        m, v = o.betas[0] * m + (1 - o.betas[0]) * g, o.betas[1] * v + (1 - o.betas[1]) * g * g
        m_hat, v_hat = m / (1 - o.betas[0] ** t), v / (1 - o.betas[1] ** t)
        w = w - o.learning_rate * (m_hat / (v_hat.sqrt() + 1e-8) + o.weight_decay * w)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(model.get_parameter(name).detach(), w, rtol=1e-10, atol=1e-12)


def test_optimizer_state_by_name_continues_bit_for_bit(qk_norm: QKNormConfig) -> None:
    config = tiny_config(qk_norm)
    straight, first, second = (new_model(config) for _ in range(3))
    train(straight, build_optimizer(straight, config), range(6))
    before = build_optimizer(first, config)
    train(first, before, range(3))
    second.load_state_dict(first.state_dict())
    after = build_optimizer(second, config)
    load_optimizer_tensors(after, second, optimizer_tensors(before, first))
    train(second, after, range(3, 6))
    for name, p in straight.named_parameters():
        assert torch.equal(p, second.get_parameter(name)), name


def test_loaded_state_does_not_share_memory_with_the_checkpoint() -> None:
    config = tiny_config()
    model = new_model(config)
    optimizer = build_optimizer(model, config)
    train(model, optimizer, range(1))
    saved = {name: t.clone() for name, t in optimizer_tensors(optimizer, model).items()}
    kept = {name: t.clone() for name, t in saved.items()}
    other = build_optimizer(model, config)
    load_optimizer_tensors(other, model, saved)
    train(model, other, range(1))
    assert all(torch.equal(saved[name], kept[name]) for name in kept)
