#include "wide.h"

#include "strands.h"

namespace sennit {

template <int V>
static void run_panels(const AttentionLaunch& launch, const Item& item, Scratch& scratch) {
  Wide<Query, Stored, typename ChooseProducts<Query, Stored, V>::type>::run(launch, item, scratch);
}

void run_wide(const AttentionLaunch& launch, const Item& item, Scratch& scratch) {
  (item.num_rows <= 2 * W ? run_panels<1> : run_panels<kMostVectors>)(launch, item, scratch);
}

}  // namespace sennit
