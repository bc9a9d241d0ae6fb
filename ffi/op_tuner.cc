#include "op_tuner.h"

#include <algorithm>
#include <limits>

namespace jax_swiglu {
namespace {

// Graphs of the reliable route come first.
std::vector<int> GraphOrder(const OpTask& task) {
  std::vector<int> order;
  for (auto route = task.routes.rbegin(); route != task.routes.rend(); ++route) {
    for (int graph : *route) {
      if (std::find(order.begin(), order.end(), graph) == order.end()) order.push_back(graph);
    }
  }
  return order;
}

// The first proposals of all graphs, then the second ones, and so on.
std::vector<PlanId> BuildOrder(const OpTask& task, const std::vector<int>& graphs) {
  std::vector<PlanId> order;
  int most = 0;
  for (int graph : graphs) most = std::max(most, task.proposals[graph]);
  for (int i = 0; i < most; ++i) {
    for (int graph : graphs) {
      if (i < task.proposals[graph]) order.push_back({graph, i});
    }
  }
  return order;
}

}  // namespace

OpChoice TuneOp(const OpTask& task, double budget_seconds, const Clock& clock) {
  const double end = clock() + budget_seconds;
  const std::vector<int> graphs = GraphOrder(task);
  std::vector<std::vector<int>> built(task.proposals.size());
  const auto build = [&](const std::vector<PlanId>& order, double seconds) {
    const std::vector<bool> is_built = task.build(order, seconds);
    for (size_t i = 0; i < order.size(); ++i) {
      if (is_built[i]) built[order[i].first].push_back(order[i].second);
    }
  };
  // The reliable route is to be had at any cost.
  std::vector<PlanId> order = BuildOrder(task, graphs);
  const auto reliable = std::stable_partition(order.begin(), order.end(), [&](PlanId id) {
    const std::vector<int>& route = task.routes.back();
    return id.second == 0 && std::find(route.begin(), route.end(), id.first) != route.end();
  });
  build({order.begin(), reliable}, std::numeric_limits<double>::infinity());
  build({reliable, order.end()}, end - budget_seconds / 2 - clock());

  OpChoice choice;
  choice.plans.assign(task.proposals.size(), -1);
  // One part of the time for each graph with a choice, and one for the routes if there is one.
  auto parts = (task.routes.size() > 1 ? 1 : 0) +
               std::count_if(built.begin(), built.end(),
                             [](const std::vector<int>& plans) { return plans.size() > 1; });
  for (int graph : graphs) {
    const std::vector<int>& plans = built[graph];
    if (plans.size() == 1) choice.plans[graph] = plans.front();
    if (plans.size() < 2) continue;
    const Fastest fastest = PickFastest(
        static_cast<int>(plans.size()),
        [&](int i, int repeats) { return task.time_plan({graph, plans[i]}, repeats); },
        (end - clock()) / static_cast<double>(parts--), clock);
    if (fastest.candidate < 0) continue;
    choice.plans[graph] = plans[fastest.candidate];
    if (task.routes == std::vector<std::vector<int>>{{graph}}) {
      choice.route = 0;
      choice.seconds = fastest.seconds;
      return choice;
    }
  }

  std::vector<int> routes;
  for (size_t r = 0; r < task.routes.size(); ++r) {
    if (std::all_of(task.routes[r].begin(), task.routes[r].end(),
                    [&](int graph) { return choice.plans[graph] >= 0; })) {
      routes.push_back(static_cast<int>(r));
    }
  }
  // Without the time to compare them, the reliable one: the first may be the worst.
  const double left = end - clock();
  if (left < budget_seconds / 10 && routes.size() > 1) routes = {routes.back()};
  const Fastest fastest = PickFastest(
      static_cast<int>(routes.size()),
      [&](int i, int repeats) { return task.time_route(routes[i], choice.plans, repeats); }, left,
      clock);
  if (fastest.candidate < 0) return choice;
  choice.route = routes[fastest.candidate];
  choice.seconds = fastest.seconds;
  return choice;
}

}  // namespace jax_swiglu
