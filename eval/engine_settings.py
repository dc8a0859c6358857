"""How `headstart eval engine=...` serves and measures: the keys of conf/eval.yaml that only it reads."""

from dataclasses import dataclass, field

STARTS = ("run", "print")
ADDRESS = ("--host", "--port")


@dataclass(frozen=True)
class ServingSettings:
    """start: run (start the servers in turn, and stop them) or print (say how to start them, and end). url,
    baseline_url: of running servers with and without the drafter, in place of that; without a baseline_url the drafter
    alone is measured. concurrency: requests in flight at a time, the first is the report's headline. repeats: timed
    passes at each. per_user: least requests of a pass for each in flight; prompts come again until there are so many.
    server_args: further words for both servers. start_timeout_s: until a server must be healthy. request_timeout_s: of
    one request. ValueError on values out of range, server_args that say where to listen, or baseline_url without url.
    """

    start: str = "run"
    url: str | None = None
    baseline_url: str | None = None
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16])
    repeats: int = 2
    per_user: int = 2
    server_args: list[str] = field(default_factory=list)
    start_timeout_s: float = 1200.0
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise ValueError(f"start must be one of {', '.join(STARTS)}, got {self.start!r}")
        if self.baseline_url and not self.url:
            raise ValueError("baseline_url needs url, the server with the drafter")
        if not self.concurrency or min(self.concurrency) < 1 or len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError(f"concurrency must hold different numbers from 1 on, got {self.concurrency}")
        # Servers take options by their first letters too.
        names = [str(word).partition("=")[0] for word in self.server_args]
        moved = [name for name in names if len(name) > 2 and any(one.startswith(name) for one in ADDRESS)]
        if moved:
            held = ", ".join(moved)
            raise ValueError(f"server_args must not hold {held}: servers listen on 127.0.0.1 and a free port")
        for name in ("repeats", "per_user", "start_timeout_s", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


KEYS = tuple(ServingSettings.__dataclass_fields__)
