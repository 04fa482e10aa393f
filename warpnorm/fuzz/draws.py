"""Choices at random, which a seed repeats whatever else the process has loaded, and a failing sequence of them made
simpler. Of options the first are the simplest."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Each choice is a number below some count. `given` ones are made again; where they end, the simplest follow."""

    def __init__(self, seed: int = 0, given: Sequence[int] | None = None) -> None:
        self.made: list[int] = []
        self._random = random.Random(seed)
        self._given = given

    def below(self, count: int) -> int:
        position = len(self.made)
        if self._given is None:
            choice = self._random.randrange(count)
        else:
            choice = min(self._given[position], count - 1) if position < len(self._given) else 0
        self.made.append(choice)
        return choice

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def flag(self, odds: int = 2) -> bool:
        """True one time in `odds`."""
        return self.below(odds) == odds - 1

    def several(self, options: Sequence[T], most: int) -> list[T]:
        """Different ones, in any order."""
        left, found = list(options), []
        for _ in range(self.below(most + 1)):
            found.append(left.pop(self.below(len(left))))
        return found


def simplest(
    choices: Sequence[int], case_of: Callable[[Draws], T], fails: Callable[[T], bool], is_over: Callable[[], bool]
) -> T:
    """What is made of the fewest and lowest choices that still fails. `case_of` of `choices` does; what it makes can be
    hashed, and is tried once."""
    draws = Draws(given=choices)
    best, found = case_of(draws), draws.made
    tried, is_better = {best}, True
    while is_better:
        is_better = False
        for trial in _simpler(found):
            if is_over():
                return best
            draws = Draws(given=trial)
            case = case_of(draws)
            if case in tried or (len(draws.made), draws.made) >= (len(found), found):
                continue
            tried.add(case)
            if fails(case):
                best, found, is_better = case, draws.made, True
                break
    return best


def _simpler(choices: list[int]) -> Iterator[list[int]]:
    """Each choice lower, by much first, with what depends on it left out or not; then two at once."""
    for i, choice in enumerate(choices):
        for lower in dict.fromkeys((0, choice // 2, choice - 1)):
            if 0 <= lower < choice:
                yield [*choices[:i], lower, *choices[i + 1 :]]
        yield [*choices[:i], *choices[i + 1 :]]
    for i, choice in enumerate(choices):
        for k in range(i + 1, len(choices)) if choice else ():
            yield [*choices[:i], choice - 1, *choices[i + 1 : k], *choices[k + 1 :]]
