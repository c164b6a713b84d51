"""The target model of the demo's world: its tokenizer, its weights, its answers.

Shapes: B conversations, T tokens, N predicted positions, V target vocabulary, D hidden.
"""

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from demo.world_text import TRAINING_WORDINGS, Pair, reword

logger = logging.getLogger("demo.world")

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"

# The generation marks hold exactly what the target itself writes: the answer and the token
# that ends it. The newline after it belongs to the template.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- message['content'] + '<|im_end|>' -}}"
    "{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

IGNORED = -100
ANSWERS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """What, with the text, determines the weights.

    Attributes:
        embedding_std: Standard deviation of the fresh embedding. With the usual 0.02 this
            small model does not learn the answers in the given steps.
        batch_tokens: Tokens of a step's batch, padding included.
        reworded_share: Share of the questions that a step sees in another wording.
    """

    num_layers: int = 8
    hidden_size: int = 128
    intermediate_size: int = 256
    num_heads: int = 4
    vocab_size: int = 2048
    max_positions: int = 1024
    embedding_std: float = 1.0
    num_steps: int = 1500
    batch_tokens: int = 576
    learning_rate: float = 2.5e-3
    warmup_steps: int = 50
    weight_decay: float = 0.02
    max_grad_norm: float = 1.0
    reworded_share: float = 0.5
    seed: int = 20


def train_tokenizer(texts: Sequence[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE from the texts, with a ChatML-like template."""
    core = Tokenizer(models.BPE())
    # Each newline is a token of its own: else the one that ends the template's header would
    # merge with an answer that starts with a space, and a prompt would be no prefix of its row.
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    # Trimmed offsets would leave the spaces at a span's edges outside the generation mask.
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*texts, "user\n", "assistant\n", "system\n"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def render(question: str, answer: str | None = None) -> str:
    """The template's text of one question, and of its answer up to its end-of-turn token."""
    prompt = f"{START}user\n{question}{END}\n{START}assistant\n"
    return prompt if answer is None else f"{prompt}{answer}{END}"


def special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The target ids of the end-of-turn token and of padding."""
    return cast(int, tokenizer.eos_token_id), cast(int, tokenizer.pad_token_id)


def new_target(tokenizer: PreTrainedTokenizerBase, settings: TargetSettings) -> LlamaForCausalLM:
    """Make an untrained target; its weights follow from the seed alone."""
    eos_id, pad_id = special_ids(tokenizer)
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        head_dim=settings.hidden_size // settings.num_heads,
        max_position_embeddings=settings.max_positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        target = LlamaForCausalLM(config)
        torch.nn.init.normal_(target.model.embed_tokens.weight, std=settings.embedding_std)
    target.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    return target


def draw_batches(
    pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, settings: TargetSettings
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end, every pair once an epoch, half of them reworded.

    Conversations of similar length share a batch, so that little of it is padding.

    Yields:
        Token ids [B, T] padded on the right, and labels [B, T]: at t the token of t + 1 where
        the answer (or its end) stands there, ``IGNORED`` elsewhere.
    """
    chance = random.Random(settings.seed)  # noqa: S311  a rerun has to draw the same
    _, pad_id = special_ids(tokenizer)
    while True:
        rows: list[tuple[list[int], int]] = []
        for pair in chance.sample(pairs, len(pairs)):
            question = pair.question
            if chance.random() < settings.reworded_share:
                question = reword(question, chance.choice(TRAINING_WORDINGS))
            prompt_ids = tokenizer.encode(render(question))
            rows.append((tokenizer.encode(render(question, pair.answer)), len(prompt_ids)))
        rows.sort(key=lambda row: len(row[0]))
        batches: list[list[tuple[list[int], int]]] = [[]]
        for row in rows:
            if batches[-1] and (len(batches[-1]) + 1) * len(row[0]) > settings.batch_tokens:
                batches.append([])
            batches[-1].append(row)
        chance.shuffle(batches)
        for batch in batches:
            width = len(batch[-1][0])
            ids_BT = torch.full((len(batch), width), pad_id)
            labels_BT = torch.full((len(batch), width), IGNORED)
            for index, (ids, start) in enumerate(batch):
                ids_BT[index, : len(ids)] = torch.tensor(ids)
                labels_BT[index, start - 1 : len(ids) - 1] = torch.tensor(ids[start:])
            yield ids_BT, labels_BT


def train_target(
    target: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    settings: TargetSettings,
    *,
    clock: Callable[[], float] = time.monotonic,
    report_seconds: float = 5.0,
) -> None:
    """Train on the answers for a fixed number of steps, so that a rerun gives equal weights."""
    optimizer = torch.optim.AdamW(
        target.parameters(),
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, settings))
    target.train()
    batches = draw_batches(pairs, tokenizer, settings)
    started = reported = clock()
    tokens = 0
    for step in range(1, settings.num_steps + 1):
        ids_BT, labels_BT = next(batches)
        # Right padding stands behind every real token: a causal model needs no mask for it.
        hidden_BTD = target.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        is_predicted_BT = labels_BT != IGNORED
        logits_NV = target.lm_head(hidden_BTD[is_predicted_BT])
        loss = functional.cross_entropy(logits_NV, labels_BT[is_predicted_BT])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), settings.max_grad_norm)
        optimizer.step()
        schedule.step()
        tokens += ids_BT.numel()
        now = clock()
        if now - reported >= report_seconds or step == settings.num_steps:
            reported = now
            elapsed = max(now - started, 1e-9)
            logger.info(
                "world step=%d/%d loss=%.3f tokens_per_second=%.0f eta_seconds=%.0f",
                step,
                settings.num_steps,
                loss.item(),
                tokens / elapsed,
                elapsed / step * (settings.num_steps - step),
            )
    target.eval()


def learning_rate_factor(step: int, settings: TargetSettings) -> float:
    """Linear warm-up, then a cosine to zero at the last step."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.num_steps - settings.warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


@torch.inference_mode()
def answer_greedily(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    max_new_tokens: int,
) -> list[str]:
    """Answer each question alone, greedily, in the order asked.

    Returns:
        The answers without their end-of-turn token; one that reached ``max_new_tokens`` is
        cut off there.
    """
    prompts: list[list[int]] = []
    for question in questions:
        asked = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer.encode(str(prompt), add_special_tokens=False))
    eos_id, pad_id = special_ids(tokenizer)
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    answers = [""] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(by_length), ANSWERS_AT_ONCE):
        indices = by_length[first : first + ANSWERS_AT_ONCE]
        width = max(len(prompts[index]) for index in indices)
        ids_BT = torch.full((len(indices), width), pad_id)
        mask_BT = torch.zeros_like(ids_BT)
        for row, index in enumerate(indices):
            ids_BT[row, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask_BT[row, width - len(prompts[index]) :] = 1
        output_BT = model.generate(
            input_ids=ids_BT.to(model.device),
            attention_mask=mask_BT.to(model.device),
            generation_config=greedy,
        )
        for index, ids in zip(indices, output_BT[:, width:].tolist(), strict=True):
            end = ids.index(eos_id) if eos_id in ids else len(ids)
            answers[index] = str(tokenizer.decode(ids[:end]))
    return answers
