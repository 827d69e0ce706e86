#!/usr/bin/env python3
"""An independent model of the samplers, written from their definitions. `sampling.py check` reads cases from standard input.

A case is a list of logits (null for a token that may not be drawn), settings by llama.cpp's names, and what is to be checked: the
kept tokens with their probabilities. A case of DRY is tokens, their texts, settings and the penalties. A case of mirostat is a
chain of draws: before each the cut, then the drawn token. The program prints the number of cases, or fails with the first wrong one.
"""

import json
import math
import sys


def softmax(logits, temperature=1.0):
    """{token: probability} of {token: logit}."""
    best = max(logits.values())
    weights = {token: math.exp((logit - best) / temperature) for token, logit in logits.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def ranked(logits):
    return sorted(logits, key=lambda token: (-logits[token], token))


def top_n_sigma(logits, n):
    # Tang et al.: the threshold is the maximum less n standard deviations of all logits.
    mean = sum(logits.values()) / len(logits)
    deviation = math.sqrt(sum((logit - mean) ** 2 for logit in logits.values()) / len(logits))
    floor = max(logits.values()) - n * deviation
    return [token for token in logits if logits[token] >= floor]


def typical(logits, p):
    # Meister et al., section 4: the smallest set of least | -log p - H | whose probability exceeds p.
    shares = softmax(logits)
    entropy = -sum(share * math.log(share) for share in shares.values() if share > 0)
    order = sorted(shares, key=lambda token: (abs(-math.log(max(shares[token], 1e-300)) - entropy), -logits[token], token))
    kept, total = [], 0.0
    for token in order:
        kept.append(token)
        total += shares[token]
        if total > p:
            break
    return kept


def top_p(logits, p):
    shares, kept, total = softmax(logits), [], 0.0
    for token in ranked(logits):
        kept.append(token)
        total += shares[token]
        if total >= p:
            break
    return kept


def min_p(logits, p):
    shares = softmax(logits)
    best = max(shares.values())
    return [token for token in shares if shares[token] >= p * best]


def xtc(logits, threshold):
    shares = softmax(logits)
    top = [token for token in ranked(logits) if shares[token] >= threshold]
    gone = set(top[:-1])
    return [token for token in logits if token not in gone]


def dynamic(logits, temperature, spread, exponent):
    if spread <= 0 or len(logits) < 2:
        return temperature
    shares = softmax(logits)
    entropy = -sum(share * math.log(share) for share in shares.values() if share > 0)
    low, high = max(0.0, temperature - spread), temperature + spread
    return low + (high - low) * (entropy / math.log(len(logits))) ** exponent


def distribution(case):
    settings = case["settings"]
    logits = {token: logit for token, logit in enumerate(case["logits"]) if logit is not None}

    def keep(tokens):
        return {token: logits[token] for token in tokens}

    if settings["mirostat"] is not None:
        # Basu et al., algorithm 1 with an exact cut: surprise in bits, at the temperature.
        shares = softmax(logits, settings["temperature"])
        logits = keep([t for t in logits if -math.log2(max(shares[t], 1e-300)) <= settings["mirostat"]] or ranked(logits)[:1])
        return softmax(logits, settings["temperature"])
    if settings["top_n_sigma"] > 0:
        logits = keep(top_n_sigma(logits, settings["top_n_sigma"]))
    if settings["top_k"] > 0:
        logits = keep(ranked(logits)[: settings["top_k"]])
    if settings["typical_p"] < 1:
        logits = keep(typical(logits, settings["typical_p"]))
    if settings["top_p"] < 1:
        logits = keep(top_p(logits, settings["top_p"]))
    if settings["min_p"] > 0:
        logits = keep(min_p(logits, settings["min_p"]))
    # The probability is 0 or 1 in the cases: the draw that decides is not part of the model.
    if settings["xtc_probability"] > 0 and settings["xtc_threshold"] <= 0.5:
        logits = keep(xtc(logits, settings["xtc_threshold"]))
    temperature = dynamic(logits, settings["temperature"], settings["dynatemp_range"], settings["dynatemp_exponent"])
    if temperature <= 0:
        return {ranked(logits)[0]: 1.0}
    return softmax(logits, temperature)


def is_near(got, want, relative=1e-6):
    return abs(got - want) <= relative * abs(want) + 1e-12


def check_distribution(case):
    want = distribution(case)
    got = {token: share for token, share in case["kept"]}
    if set(got) != set(want) or not all(is_near(got[token], want[token]) for token in want):
        raise SystemExit(f"{case['settings']}: {len(got)} kept instead of {len(want)}: {case['kept'][:9]}, {list(want.items())[:9]}")


def dry(case):
    """Every earlier place, compared with the end token by token; no repetition may touch a breaker's text."""
    settings, tokens = case["settings"], case["tokens"]
    tokens = tokens[max(0, len(tokens) - settings["last"]) :]
    texts = [case["texts"][token] for token in tokens]
    starts = [sum(map(len, texts[:place])) for place in range(len(texts) + 1)]
    whole = "".join(texts)
    # The breaker that begins last; of several in one token, the one that reaches furthest.
    found = [(at, at + len(b)) for b in settings["breakers"] for at in range(len(whole)) if whole.startswith(b, at)]
    most = len(tokens)
    if found:
        holder = max(place for place in range(len(tokens)) for at, _ in found if starts[place] <= at < starts[place + 1])
        end = max(end for at, end in found if starts[holder] <= at < starts[holder + 1])
        most = sum(1 for start in starts[:-1] if start >= end)
    less = {}
    for place in range(1, len(tokens)):
        length = 0
        while length < place and length < most and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= settings["allowed_length"]:
            penalty = settings["multiplier"] * settings["base"] ** (length - settings["allowed_length"])
            penalty = min(penalty, 1e30)  # the daemon's bound: a logit less this is finite
            less[tokens[place]] = max(penalty, less.get(tokens[place], 0.0))
    return less


def check_dry(case):
    want = dry(case)
    got = {token: penalty for token, penalty in case["less"]}
    if set(got) != set(want) or not all(is_near(got[token], want[token]) for token in want):
        raise SystemExit(f"DRY of {case['tokens']} by {case['settings']}: {got} instead of {want}")


def check_mirostat(case):
    """The cut before each draw follows from the surprise of the tokens before it."""
    settings = case["settings"]
    cut = 2 * settings["tau"]
    for draw in case["draws"]:
        if abs(draw["cut"] - cut) > 1e-4 * max(1.0, abs(cut)):
            raise SystemExit(f"mirostat's cut is {draw['cut']} instead of {cut}")
        logits = dict(enumerate(draw["logits"]))
        shares = softmax(logits, settings["temperature"])
        kept = [t for t in logits if -math.log2(max(shares[t], 1e-300)) <= cut] or ranked(logits)[:1]
        shares = softmax({token: logits[token] for token in kept}, settings["temperature"])
        cut -= settings["eta"] * (-math.log2(shares[draw["token"]]) - settings["tau"])


def main():
    if sys.argv[1:] != ["check"]:
        raise SystemExit("usage: sampling.py check <cases")
    checks = {"kept": check_distribution, "less": check_dry, "draws": check_mirostat}
    count = 0
    for line in sys.stdin:
        case = json.loads(line)
        next(check for key, check in checks.items() if key in case)(case)
        count += 1
    print(count)


main()
