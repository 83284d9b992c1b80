// The derivatives of the operators: each is an autograd function around an operator, and its derivative another one.
// In Python such a function costs tens of microseconds in each direction: by then the interpreter has left the caches.
// PyTorch's stable ABI has no autograd. So this file alone includes its other headers, and compiles for longest.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;

template <typename Signature> auto find(const char *name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Call an operator below autograd
template <typename Operator, typename... Args> auto call(const Operator &op, Args &&...args) {
  at::AutoDispatchBelowADInplaceOrView below;
  return op.call(std::forward<Args>(args)...);
}

// save_for_backward() takes no optional tensors
Tensor or_undefined(const MaybeTensor &x) { return x.value_or(Tensor()); }
MaybeTensor if_defined(const Tensor &x) { return x.defined() ? MaybeTensor(x) : std::nullopt; }

// The saved tensors. Gradients are enabled in a backward pass only with create_graph=True.
variable_list saved(AutogradContext *ctx) {
  TORCH_CHECK(!at::GradMode::is_enabled(), "the derivative of a kernel has no derivative: create_graph=True needs the "
                                           "environment variable CXX=none");
  return ctx->get_saved_variables();
}

struct RMSNorm : Function<RMSNorm> {
  static Tensor forward(AutogradContext *ctx, const Tensor &x, const Tensor &gain, double eps) {
    static auto op = find<Tensor(const Tensor &, const Tensor &, double)>("nanoqk::rms_norm");
    ctx->save_for_backward({x, gain});
    ctx->saved_data["eps"] = eps;
    return call(op, x, gain, eps);
  }
  static variable_list backward(AutogradContext *ctx, variable_list grads) {
    using Result = std::tuple<Tensor, Tensor>;
    static auto op = find<Result(const Tensor &, const Tensor &, const Tensor &, double)>("nanoqk::rms_norm_backward");
    auto inputs = saved(ctx);
    auto [grad_x, grad_gain] = call(op, grads[0], inputs[0], inputs[1], ctx->saved_data["eps"].toDouble());
    return {grad_x, grad_gain, Tensor()};
  }
};

struct LpNorm : Function<LpNorm> {
  static Tensor forward(AutogradContext *ctx, const Tensor &x, const MaybeTensor &alpha, double p) {
    static auto op = find<Tensor(const Tensor &, const MaybeTensor &, double)>("nanoqk::lp_norm");
    ctx->save_for_backward({x, or_undefined(alpha)});
    ctx->saved_data["p"] = p;
    return call(op, x, alpha, p);
  }
  static variable_list backward(AutogradContext *ctx, variable_list grads) {
    using Result = std::tuple<Tensor, Tensor>;
    static auto op =
        find<Result(const Tensor &, const Tensor &, const MaybeTensor &, double)>("nanoqk::lp_norm_backward");
    auto inputs = saved(ctx);
    auto alpha = if_defined(inputs[1]);
    auto [grad_x, grad_alpha] = call(op, grads[0], inputs[0], alpha, ctx->saved_data["p"].toDouble());
    return {grad_x, alpha ? grad_alpha : Tensor(), Tensor()};
  }
};

// softmax (2, B, nh, T) is each query's largest logit and the log of its sum: the derivative of the second is that of
// the log-sum-exp. Often only y is used, or only softmax.
struct Attention : Function<Attention> {
  static variable_list forward(AutogradContext *ctx, const Tensor &q, const Tensor &k, const Tensor &v, double scale,
                               double cap, int64_t dropped, const MaybeTensor &seed) {
    using Result = std::tuple<Tensor, Tensor>;
    static auto op = find<Result(const Tensor &, const Tensor &, const Tensor &, double, double, int64_t,
                                 const MaybeTensor &)>("nanoqk::attention");
    auto [y, softmax] = call(op, q, k, v, scale, cap, dropped, seed);
    ctx->save_for_backward({q, k, v, softmax, or_undefined(seed)});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["cap"] = cap;
    ctx->saved_data["dropped"] = dropped;
    ctx->set_materialize_grads(false);
    return {y, softmax};
  }
  static variable_list backward(AutogradContext *ctx, variable_list grads) {
    using Result = std::tuple<Tensor, Tensor, Tensor>;
    static auto op = find<Result(const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                                 const MaybeTensor &, double, double, int64_t, const MaybeTensor &)>(
        "nanoqk::attention_backward");
    auto inputs = saved(ctx);
    const auto &q = inputs[0], &k = inputs[1], &v = inputs[2];
    auto grad = grads[0].defined()
                    ? grads[0]
                    : v.new_zeros_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)});
    auto grad_lse = grads[1].defined() ? MaybeTensor(grads[1].select(0, 1).contiguous()) : std::nullopt;
    auto [grad_q, grad_k, grad_v] = call(
        op, grad, q, k, v, inputs[3], grad_lse, ctx->saved_data["scale"].toDouble(), ctx->saved_data["cap"].toDouble(),
        ctx->saved_data["dropped"].toInt(), if_defined(inputs[4]));
    if (q.sym_size(1) != k.sym_size(1)) { // heads share a key and a value
      grad_k = grad_k.unflatten_symint(1, {k.sym_size(1), -1}).sum(2);
      grad_v = grad_v.unflatten_symint(1, {k.sym_size(1), -1}).sum(2);
    }
    return {grad_q, grad_k, grad_v, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

struct Linear : Function<Linear> {
  static Tensor forward(AutogradContext *ctx, const Tensor &x, const Tensor &weight) {
    static auto op = find<Tensor(const Tensor &, const Tensor &)>("nanoqk::linear");
    ctx->save_for_backward({x, weight});
    return call(op, x, weight);
  }
  static variable_list backward(AutogradContext *ctx, variable_list grads) {
    using Result = std::tuple<Tensor, Tensor>;
    static auto op = find<Result(const Tensor &, const Tensor &, const Tensor &)>("nanoqk::linear_backward");
    auto inputs = saved(ctx);
    auto [grad_x, grad_weight] = call(op, grads[0], inputs[0], inputs[1]);
    return {grad_x, grad_weight};
  }
};

struct LayerNorm : Function<LayerNorm> {
  static Tensor forward(AutogradContext *ctx, const Tensor &x, const Tensor &weight, const MaybeTensor &bias,
                        double eps, bool centred, at::ScalarType dtype) {
    static auto op = find<Tensor(const Tensor &, const Tensor &, const MaybeTensor &, double, bool, at::ScalarType)>(
        "nanoqk::layer_norm");
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["centred"] = centred;
    return call(op, x, weight, bias, eps, centred, dtype);
  }
  static variable_list backward(AutogradContext *ctx, variable_list grads) {
    using Result = std::tuple<Tensor, Tensor, Tensor>;
    static auto op = find<Result(const Tensor &, const Tensor &, const Tensor &, bool, double, bool)>(
        "nanoqk::layer_norm_backward");
    auto inputs = saved(ctx);
    auto has_bias = ctx->saved_data["has_bias"].toBool();
    auto [grad_x, grad_weight, grad_bias] =
        call(op, grads[0], inputs[0], inputs[1], has_bias, ctx->saved_data["eps"].toDouble(),
             ctx->saved_data["centred"].toBool());
    return {grad_x, grad_weight, has_bias ? grad_bias : Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

using Drop = Tensor(const Tensor &, int64_t, const MaybeTensor &, at::ScalarType);

// The derivative of dropout is dropout with the same seed
Tensor drop_again(AutogradContext *ctx, const Tensor &grad, at::ScalarType dtype) {
  static auto op = find<Drop>("nanoqk::dropout");
  return call(op, grad, ctx->saved_data["dropped"].toInt(), if_defined(saved(ctx)[0]), dtype);
}

struct Dropout : Function<Dropout> {
  static Tensor forward(AutogradContext *ctx, const Tensor &x, int64_t dropped, const MaybeTensor &seed,
                        at::ScalarType dtype) {
    static auto op = find<Drop>("nanoqk::dropout");
    ctx->save_for_backward({or_undefined(seed)});
    ctx->saved_data["dropped"] = dropped;
    return call(op, x, dropped, seed, dtype);
  }
  static variable_list backward(AutogradContext *ctx, variable_list grads) {
    return {drop_again(ctx, grads[0].to(at::kFloat), at::kFloat), Tensor(), Tensor(), Tensor()};
  }
};

struct DropoutAdd : Function<DropoutAdd> {
  static Tensor forward(AutogradContext *ctx, const Tensor &x, const Tensor &y, int64_t dropped,
                        const MaybeTensor &seed) {
    static auto op = find<Tensor(const Tensor &, const Tensor &, int64_t, const MaybeTensor &)>("nanoqk::dropout_add");
    ctx->save_for_backward({or_undefined(seed)});
    ctx->saved_data["dropped"] = dropped;
    ctx->saved_data["dtype"] = static_cast<int64_t>(y.scalar_type());
    return call(op, x, y, dropped, seed);
  }
  static variable_list backward(AutogradContext *ctx, variable_list grads) {
    auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    return {grads[0], drop_again(ctx, grads[0], dtype), Tensor(), Tensor()};
  }
};

struct GELU : Function<GELU> {
  static Tensor forward(AutogradContext *ctx, const Tensor &x) {
    static auto op = find<Tensor(const Tensor &)>("nanoqk::gelu");
    ctx->save_for_backward({x});
    return call(op, x);
  }
  static variable_list backward(AutogradContext *ctx, variable_list grads) {
    static auto op = find<Tensor(const Tensor &, const Tensor &)>("nanoqk::gelu_backward");
    return {call(op, grads[0], saved(ctx)[0])};
  }
};

std::tuple<Tensor, Tensor> attention(const Tensor &q, const Tensor &k, const Tensor &v, double scale, double cap,
                                     int64_t dropped, const MaybeTensor &seed) {
  auto results = Attention::apply(q, k, v, scale, cap, dropped, seed);
  return {results[0], results[1]};
}

// F::apply(), with the arguments of F::forward()
template <typename F, typename... Args> auto applied(Tensor (*)(AutogradContext *, Args...)) {
  return +[](Args... args) -> Tensor { return F::apply(args...); };
}

} // namespace

TORCH_LIBRARY_IMPL(nanoqk, Autograd, m) {
  m.impl("rms_norm", applied<RMSNorm>(RMSNorm::forward));
  m.impl("lp_norm", applied<LpNorm>(LpNorm::forward));
  m.impl("attention", attention);
  m.impl("linear", applied<Linear>(Linear::forward));
  m.impl("layer_norm", applied<LayerNorm>(LayerNorm::forward));
  m.impl("dropout", applied<Dropout>(Dropout::forward));
  m.impl("dropout_add", applied<DropoutAdd>(DropoutAdd::forward));
  m.impl("gelu", applied<GELU>(GELU::forward));
}
