"""A side of `bench.peers` that needs no model: it counts on from the prompt's last token, and errs where it is told."""

from bench.peer_sides import Generated, Setup


class FakeSide:
    def __init__(self, setup: Setup) -> None:
        self.off = setup.options.get("off", {})
        self.about = f"fake with {setup.threads} threads"
        self.calls = 0

    def generate(self, prompt: list[int], max_tokens: int) -> Generated:
        if self.off == "dies":
            raise RuntimeError("no more")
        tokens = [prompt[-1] + 1 + i for i in range(max_tokens)]
        if str(prompt[-1]) in self.off:
            tokens[self.off[str(prompt[-1])]] += 100
        self.calls += 1
        return Generated(tokens, 0.5, 0.1, max_tokens)

    def pass_ms(self, rows: int, context: int) -> float:
        print("libraries print where they like")
        return rows + context / 1000

    def logits_of(self, tokens: list[int], candidates: list[int]) -> list[float]:
        return [len(tokens) - candidate / 1000 for candidate in candidates]
