"""The real vLLM and engine.local with the same weights, and faults of an update."""

import torch

from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.engine.vllm.engine import VllmEngine
from creditgraph.components.models.experts import unstack
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.payloads import Weights

CONTEXT = 192


class Pair:
    """engine.vllm and engine.local on one model, always loaded with the same weights."""

    def __init__(self, path, **settings):
        from creditgraph.components.models.load import load_causal_lm

        spec = ModelSpec(path=path, max_context=CONTEXT)
        self.vllm, self.local = (
            VllmEngine(VllmEngine.Config(kv_cache_gb=0.25, **settings)),
            LocalEngine(LocalEngine.Config()),
        )
        for engine in (self.vllm, self.local):
            engine.setup(Context(node="engine", model=spec))
        self.model = load_causal_lm(spec)
        self.original = {name: tensor.clone() for name, tensor in unstack(self.model.state_dict())}
        self.version = -1
        self.load()

    def load(self, noise=0.0):
        """Loads the original weights, with noise, in both; the model has them too."""
        generator = torch.Generator().manual_seed(self.version + 10)
        own = {name: t for name, t in self.original.items() if name not in self.vllm.names.tied}
        changed = {name: t + noise * torch.randn(t.shape, generator=generator) for name, t in own.items()}
        self.version += 1
        self.weights = Weights(version=self.version, tensors=changed)
        names = self.vllm.names
        self.model.float().load_state_dict(names.of_model(names.resolve(self.weights)))
        self.policy = self.vllm.run(weights=self.weights).policy
        self.reference = self.local.run(weights=self.weights).policy

    def exact(self, context, tokens, temperature):
        """Log-probs and entropies of each row by transformers in float64."""
        model, logprobs, entropies = self.model.double(), [], []
        for before, after in zip(context.to_lists(), tokens.rows(), strict=True):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([before + after.tolist()])).logits[0, len(before) - 1 : -1]
            table = torch.log_softmax(logits / temperature, -1)
            logprobs.append(table.gather(1, after.long()[:, None])[:, 0])
            entropies.append(-(table.exp() * table).sum(-1))
        return torch.cat(logprobs).float(), torch.cat(entropies).float()


def corrupt_a_layer(pair, monkeypatch):
    from creditgraph.components.engine.vllm.receive import Receiver

    load = Receiver.load

    def wrong(receiver, pairs):
        load(receiver, ((n, t + 0.05 if n.endswith("layers.1.mlp.down_proj.weight") else t) for n, t in pairs))

    monkeypatch.setattr(Receiver, "load", wrong)


def skip_the_tied_head(pair, monkeypatch):
    monkeypatch.setattr("creditgraph.components.engine.vllm.receive.refresh_tied", lambda model: None)


def swap_on_the_way(pair, monkeypatch):
    call = pair.vllm.backend.llm.collective_rpc

    def wrong(method, args=(), kwargs=None):
        if method == "creditgraph_update":
            kwargs = {**kwargs, "tensors": {n: t.flip(0) for n, t in kwargs["tensors"].items()}}
        return call(method, args=args, kwargs=kwargs)

    monkeypatch.setattr(pair.vllm.backend.llm, "collective_rpc", wrong)


def worker_of(pair):
    return pair.vllm.backend.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
