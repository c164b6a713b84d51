"""The reference engine: any causal language model that transformers loads, on CPU or GPU.

Shapes: B sequences, T tokens, A auxiliary states (3), D hidden size of the target.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils.logging import disable_progress_bar

from eagle3_tasks.contracts.errors import GpuProblem, InvalidInput, MissingSoftware, OutOfMemory
from eagle3_tasks.contracts.settings import Settings
from eagle3_tasks.engines.batches import batches_by_length
from eagle3_tasks.engines.canary import check_model
from eagle3_tasks.engines.decoder import Decoder
from eagle3_tasks.engines.interface import GeneratedAnswer, TargetDescription, resolve_aux_layer_ids
from eagle3_tasks.engines.target_folder import check_target_folder, is_hub_name, read_target_description
from eagle3_tasks.engines.weight_files import check_whole, weight_files
from eagle3_tasks.storage.sample import CapturedSample

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_NAMED = 3

T = TypeVar("T")


class HuggingFaceEngine:
    """A target model in this process. Make one with :meth:`load`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        description: TargetDescription,
        aux_layer_ids: Sequence[int],
        dtype: torch.dtype,
        batch_tokens: int,
        end_ids: Sequence[int],
    ) -> None:
        self._model: Any = model.eval()
        self._description = description
        self._aux_layer_ids = tuple(aux_layer_ids)
        self._dtype = dtype
        self._batch_tokens = batch_tokens
        self._end_ids = tuple(end_ids)
        self._decoder = Decoder(model, num_layers=description.num_layers)
        self._device = next(self._decoder.module.parameters()).device
        # A model's own generation_config may hold penalties and top-k: then greedy would not be greedy.
        self._model.generation_config = GenerationConfig()

    @classmethod
    def load(cls, settings: Settings) -> HuggingFaceEngine:
        """Load the target that the settings name and prove it fit for capture.

        Raises:
            InvalidInput: files missing or unreadable, or an unsupported architecture.
            GpuProblem: the settings say cuda, and there is no card.
            OutOfMemory: the weights don't fit.
        """
        # A log file is no terminal: a bar there is a hundred lines.
        disable_progress_bar()
        check_target_folder(settings)
        description = read_target_description(settings)
        layer_ids = resolve_aux_layer_ids(settings.target.aux_layer_ids, description.num_layers)
        dtype = DTYPES[settings.target.capture_dtype]
        began = time.monotonic()
        logger.info(
            "loading target target_model=%s device=%s dtype=%s",
            settings.target.target_model, settings.host.device, settings.target.capture_dtype,
        )  # fmt: skip
        model = _load_model(settings, dtype)
        engine = cls(
            model,
            description=description,
            aux_layer_ids=layer_ids,
            dtype=dtype,
            batch_tokens=settings.extraction.capture_batch_tokens,
            end_ids=_end_ids(settings, model),
        )
        check_model(model, engine._decoder, layer_ids=layer_ids, vocab_size=description.vocab_size)
        logger.info(
            "target loaded architecture=%s num_layers=%d hidden_size=%d aux_layer_ids=%s seconds=%.1f",
            description.architecture, description.num_layers, description.hidden_size, list(layer_ids),
            time.monotonic() - began,
        )  # fmt: skip
        return engine

    def describe(self) -> TargetDescription:
        return self._description

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, by generation_config, config and tokenizer."""
        return self._end_ids

    def capture(self, batch: Sequence[Sequence[int]]) -> list[CapturedSample]:
        """Capture the hidden states of each sequence, in the order given. See ``Engine``."""
        _check_ids(batch, self._description.vocab_size)
        return _in_batches(
            batch,
            [len(ids) for ids in batch],
            self._batch_tokens,
            self._capture_padded,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_ids: Sequence[int] = (),
        seed: int = 0,
    ) -> list[GeneratedAnswer]:
        """Answer each prompt, in the order given. See ``Engine``."""
        _check_ids(prompts, self._description.vocab_size)
        end_ids = sorted({*self._end_ids, *stop_ids})

        def answer(part: Sequence[Sequence[int]]) -> list[GeneratedAnswer]:
            return self._generate_padded(
                part, max_new_tokens=max_new_tokens, temperature=temperature, end_ids=end_ids, seed=seed
            )

        lengths = [len(ids) + max_new_tokens for ids in prompts]
        return _in_batches(prompts, lengths, self._batch_tokens, answer)

    @torch.no_grad()  # inference_mode's tensors could not be trained on
    def _capture_padded(self, batch: Sequence[Sequence[int]]) -> list[CapturedSample]:
        ids_BT, mask_BT = self._padded(batch, is_left=False)
        aux_BTAD, last_BTD = self._decoder.forward(ids_BT, mask_BT, self._aux_layer_ids)
        return [
            CapturedSample(
                token_ids=ids_BT[index, : len(ids)].to("cpu", torch.int32),
                aux_hidden=aux_BTAD[index, : len(ids)].to("cpu", self._dtype).contiguous(),
                last_hidden=last_BTD[index, : len(ids)].to("cpu", self._dtype).contiguous(),
            )
            for index, ids in enumerate(batch)
        ]

    @torch.inference_mode()
    def _generate_padded(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        end_ids: Sequence[int],
        seed: int,
    ) -> list[GeneratedAnswer]:
        ids_BT, mask_BT = self._padded(prompts, is_left=True)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=list(end_ids) or None,
            pad_token_id=end_ids[0] if end_ids else 0,
            **sampling,
        )
        with torch.random.fork_rng(devices=_cuda_devices(self._device)):
            torch.manual_seed(seed)
            output_BT = self._model.generate(
                input_ids=ids_BT, attention_mask=mask_BT, generation_config=config
            )
        return [_cut_answer(row[ids_BT.shape[1] :], end_ids) for row in output_BT.tolist()]

    def _padded(self, batch: Sequence[Sequence[int]], *, is_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(len(ids) for ids in batch)
        ids_BT = torch.zeros(len(batch), width, dtype=torch.long)
        mask_BT = torch.zeros(len(batch), width, dtype=torch.long)
        for index, ids in enumerate(batch):
            place = slice(width - len(ids), width) if is_left else slice(0, len(ids))
            ids_BT[index, place] = torch.tensor(ids, dtype=torch.long)
            mask_BT[index, place] = 1
        return ids_BT.to(self._device), mask_BT.to(self._device)


def _in_batches(
    sequences: Sequence[Sequence[int]],
    lengths: Sequence[int],
    batch_tokens: int,
    run: Callable[[Sequence[Sequence[int]]], list[T]],
) -> list[T]:
    """Run batches by length and give the results in the order of ``sequences``."""
    results: dict[int, T] = {}
    waiting = batches_by_length(lengths, batch_tokens)[::-1]
    while waiting:
        batch = waiting.pop()
        try:
            results.update(zip(batch, run([sequences[index] for index in batch]), strict=True))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            if len(batch) == 1:
                raise OutOfMemory(
                    f"one sequence of {lengths[batch[0]]} tokens does not fit into memory. Lower max_tokens, "
                    "or give the target more or larger cards."
                ) from error
        if batch[0] not in results:
            # Outside the except block: the error's traceback holds the tensors that must go first.
            _free_memory()
            half = len(batch) // 2
            waiting += [batch[half:], batch[:half]]
            logger.warning(
                "out of memory batch=%d tokens=%d: halved", len(batch), lengths[batch[0]] * len(batch)
            )
    return [results[index] for index in range(len(sequences))]


def _is_out_of_memory(error: BaseException) -> bool:
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _cut_answer(ids: Sequence[int], end_ids: Sequence[int]) -> GeneratedAnswer:
    ends = set(end_ids)
    for index, token_id in enumerate(ids):
        if token_id in ends:
            return GeneratedAnswer(ids=tuple(ids[: index + 1]), finish="stop")
    return GeneratedAnswer(ids=tuple(ids), finish="length")


def _check_ids(batch: Sequence[Sequence[int]], vocab_size: int) -> None:
    for ids in batch:
        if not ids:
            raise InvalidInput("a sequence without tokens can't be given to the target.")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidInput(
                f"token ids from {min(ids)} to {max(ids)} for a target with a vocabulary of {vocab_size}: "
                "the tokenizer is another model's. Put the target's own tokenizer into its folder."
            )


def _load_model(settings: Settings, dtype: torch.dtype) -> nn.Module:
    target = settings.target
    arguments: dict[str, Any] = {
        "revision": target.target_revision or None,
        "trust_remote_code": target.trust_remote_code,
    }
    try:
        config: Any = AutoConfig.from_pretrained(target.target_model, **arguments)
        loader = loader_of(config)
        arguments |= {"dtype": dtype, "use_safetensors": True, "config": config}
        model: Any = loader.from_pretrained(target.target_model, **arguments, **_placement(settings))
        return (
            model if settings.host.device == "cpu" or settings.host.extraction_gpus > 1 else model.to("cuda")
        )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(
            f"the target's weights do not fit into memory ({error}). Give it more or larger cards."
        ) from error
    except SafetensorError as error:
        raise _unreadable(settings, error) from error
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _unsupported(target.target_model, error) from error


def loader_of(config: Any) -> Any:
    """Choose the class of transformers that loads a configuration as a causal language model.

    Raises:
        ValueError: there is none.
    """
    remote: dict[str, str] = getattr(config, "auto_map", None) or {}
    for loader in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in cast("Any", loader)._model_mapping or loader.__name__ in remote:  # noqa: SLF001
            return loader
    raise ValueError(f"model type {config.model_type!r} is no causal language model for transformers")


def check_loadable(settings: Settings) -> None:
    """Refuse a target that this engine can't load, without loading its weights.

    Raises:
        InvalidInput: the configuration or architecture is unknown, or files are missing.
    """
    check_target_folder(settings)
    target = settings.target
    try:
        loader_of(
            AutoConfig.from_pretrained(
                target.target_model,
                revision=target.target_revision or None,
                trust_remote_code=target.trust_remote_code,
            )
        )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _unsupported(target.target_model, error) from error


def _unreadable(settings: Settings, error: Exception) -> InvalidInput:
    name = settings.target.target_model
    remedy = "Remove its copy from the hub's cache, so that it is fetched again."
    if not is_hub_name(settings):
        files = weight_files(Path(name))
        # Where a header tells which file it is, this says so.
        check_whole(files)
        named = ", ".join(path.name for path in files[:_NAMED])
        remedy = f"Copy the {len(files)} weight files ({named}) again from the model's source."
    return InvalidInput(f"the weights of target_model {name!r} are damaged ({error}). {remedy}")


def _unsupported(name: str, error: Exception) -> InvalidInput:
    import transformers

    reason = " ".join(str(error).split())[:600]
    return InvalidInput(
        f"transformers {transformers.__version__} can't load target_model {name!r}: {reason}. Repair the "
        "files, switch trust_remote_code on if the model ships its own code, or choose a supported target."
    )


def _placement(settings: Settings) -> dict[str, Any]:
    """Say where weights go. Several cards take accelerate's map, layer by layer."""
    host = settings.host
    if host.device == "cpu":
        return {}
    found = torch.cuda.device_count()
    if found < max(1, host.extraction_gpus):
        raise GpuProblem(
            f"{found} cards are visible, the target needs {host.extraction_gpus}. Look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or lower extraction_gpus."
        )
    if host.extraction_gpus == 1:
        return {}
    try:
        import accelerate  # pyright: ignore[reportMissingImports] # noqa: F401
    except ImportError as error:
        raise MissingSoftware(
            "the package accelerate is needed to spread the target over several cards. Install it on the GPU "
            "host."
        ) from error
    # A tenth stays free on each card for the activations of a batch.
    limits = {card: int(torch.cuda.mem_get_info(card)[0] * 0.9) for card in range(host.extraction_gpus)}
    return {"device_map": "auto", "max_memory": limits}


def _end_ids(settings: Settings, model: Any) -> list[int]:
    """Collect every id that ends an answer: generation_config's, the configuration's, the tokenizer's."""
    target = settings.target
    tokenizer = AutoTokenizer.from_pretrained(
        target.target_model,
        revision=target.target_revision or None,
        trust_remote_code=target.trust_remote_code,
    )
    found = [
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ]
    ids: set[int] = set()
    for one in found:
        ids.update(one if isinstance(one, list | tuple) else () if one is None else (int(one),))
    return sorted(ids)


def _cuda_devices(device: torch.device) -> list[int]:
    return list(range(torch.cuda.device_count())) if device.type == "cuda" else []
