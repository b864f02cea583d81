// Checks a step's arrays before anything is read through them: a bad index must be an error, not a write somewhere.
#pragma once

#include "model.h"

namespace naru {

// 0, or minus the number of the broken rule; the Python side has the sentence for each.
int32_t validate(const ModelSpec& spec, const StepInputs& in, const SamplingInputs* sampling);

}  // namespace naru
