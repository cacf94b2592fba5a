#include "wide.h"

#include "strands.h"

namespace sennit {

void run_wide(const AttentionLaunch& launch, const Item& item, Scratch& scratch) {
  Wide<Query, Stored, ChooseProducts<Query, Stored>::type>::run(launch, item, scratch);
}

}  // namespace sennit
