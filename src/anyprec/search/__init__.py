"""Plans: bits per layer, found from a few hundred images and stored as a profile of the same model file. No torch.

layers = PlanLayers(format.read("net.apm"))
result = search(anyprec.load("net.apm"), layers, images)
best = result.best(latency_ms=0.8)
format.write(add_profile(layers, "fast", best.plan, result.rows[best.plan]), "net.apm")
"""

from anyprec.search.layers import PlanLayers
from anyprec.search.search import PlanPoint, SearchResult, SearchSettings, search
from anyprec.search.store import add_profile

__all__ = ["PlanLayers", "PlanPoint", "SearchResult", "SearchSettings", "add_profile", "search"]
