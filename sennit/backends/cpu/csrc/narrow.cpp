#include "narrow.h"

#include "strands.h"

namespace sennit {

// With room for the item's rows, and no more than needed.
template <int R>
static void run_rows(const AttentionLaunch& launch, const Item& item, Scratch& scratch) {
  if constexpr (R < kNarrowRows) {
    if (item.num_rows > R) return run_rows<2 * R>(launch, item, scratch);
  }
  Narrow<Query, Stored, R>::run(launch, item, scratch);
}

void run_narrow(const AttentionLaunch& launch, const Item& item, Scratch& scratch) {
  run_rows<1>(launch, item, scratch);
}

}  // namespace sennit
