#include "step_arguments.h"

namespace layerzero {

namespace {

constexpr const char* kOp = "flat_step_";

void expect_dtype(const Handle& tensor, int32_t scalar_type, const char* what, const char* name) {
  if (numel_of(tensor) > 0 && scalar_type_of(tensor) != scalar_type)
    refuse(kOp, ": ", what, " must be ", name, ", got scalar type ", scalar_type_of(tensor));
}

StepForm form_of(const Handle& state, layerzero_dtype main) {
  const int32_t scalar_type = scalar_type_of(state);
  if (scalar_type == (main == LZ_FLOAT64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32()))
    return kFullForm;
  if (main != LZ_FLOAT64 && scalar_type == aoti_torch_dtype_bfloat16()) return kBfloatForm;
  if (main != LZ_FLOAT64 && scalar_type == aoti_torch_dtype_uint8()) return kQuantForm;
  refuse(kOp, ": states must be float32 (float64 for float64), bfloat16 or uint8, got scalar type ",
         scalar_type);
}

}  // namespace

// (main, grad, states, scales, table, rows, factor, grad_scale, seed), of which
// all tensors but factor are lists with an entry, of states and scales `num_states` entries,
// for each flat parameter.
StepArguments::StepArguments(StableIValue* stack)
    : main(stack[0]),
      grad(stack[1]),
      states(stack[2]),
      scales(stack[3]),
      table(stack[4]),
      rows(stack[5]),
      factor_tensor(unbox<AtenTensorHandle>(stack[6])) {
  const size_t count = main.tensors.size();
  for (const TensorList* const list : {&grad, &table, &rows})
    if (list->tensors.size() != count)
      refuse(kOp, ": got a list of ", list->tensors.size(), " tensors beside ", count, " of main");
  if (count == 0) return;
  const size_t num_states = states.tensors.size() / count;
  if (num_states * count != states.tensors.size() ||
      (!scales.tensors.empty() && scales.tensors.size() != states.tensors.size()))
    refuse(kOp, ": got ", states.tensors.size(), " states and ", scales.tensors.size(),
           " scales for ", count, " flat parameters");
  if (num_states < 2 || num_states > kMaxStates) refuse(kOp, ": got ", num_states, " states");
  StepJob shared{};
  shared.num_states = static_cast<int>(num_states);
  shared.factor = 1.0f;
  shared.grad_scale = static_cast<float>(unbox<double>(stack[7]));
  shared.seed = unbox<int64_t>(stack[8]);
  for (size_t i = 0; i < count; ++i) flats.push_back(flat_of(i, shared));
  if (numel_of(factor_tensor) > 0) {
    expect_dtype(factor_tensor, aoti_torch_dtype_float32(), "factor", "float32");
    factor =
        static_cast<const float*>(memory_of(factor_tensor, kOp, "factor", flats[0].main.device));
  }
}

StepFlatArguments StepArguments::flat_of(size_t i, const StepJob& shared) const {
  StepFlatArguments flat;
  StepJob& job = flat.job;
  job = shared;
  const auto num_states = static_cast<size_t>(job.num_states);
  flat.main = check_output(main.tensors[i], kOp);
  const Device device = flat.main.device;
  job.dtype = flat.main.dtype;
  job.main = static_cast<char*>(flat.main.data);
  job.main_numel = flat.main.numel;
  if (dtype_of(grad.tensors[i], kOp, "grad", -1) != job.dtype)
    refuse(kOp, ": grad must be ", name_of(job.dtype), ", as main is");
  flat.grad_numel = numel_of(grad.tensors[i]);
  job.grad = static_cast<const char*>(memory_of(grad.tensors[i], kOp, "grad", device));

  for (size_t s = 0; s < num_states; ++s) {
    const Handle& state = states.tensors[i * num_states + s];
    const StepForm form = form_of(state, job.dtype);
    if (s > 0 && form != job.form) refuse(kOp, ": states must have one dtype");
    job.form = form;
    const int64_t numel = numel_of(state);
    if (s > 0 && numel != flat.state_numel)
      refuse(kOp, ": state ", s, " has ", numel, " elements, state 0 has ", flat.state_numel);
    flat.state_numel = numel;
    job.states[s] = static_cast<char*>(memory_of(state, kOp, "a state", device));
  }
  if (job.form == kQuantForm) {
    if (scales.tensors.empty()) refuse(kOp, ": got 0 scales for ", num_states, " states");
    for (size_t s = 0; s < num_states; ++s) {
      const Handle& own = scales.tensors[i * num_states + s];
      expect_dtype(own, aoti_torch_dtype_float32(), "scales", "float32");
      job.scales[s] = static_cast<float*>(memory_of(own, kOp, "scales", device));
      flat.scale_numels[s] = numel_of(own);
    }
  }

  const int64_t table_numel = numel_of(table.tensors[i]);
  expect_dtype(table.tensors[i], aoti_torch_dtype_int64(), "table", "int64");
  if (table_numel % kStepColumns != 0)
    refuse(kOp, ": table must be [R, ", kStepColumns + 0, "], got ", table_numel, " elements");
  job.table = static_cast<const int64_t*>(memory_of(table.tensors[i], kOp, "table", device));
  job.num_ranges = table_numel / kStepColumns;
  const int64_t row_numel = numel_of(rows.tensors[i]);
  expect_dtype(rows.tensors[i], aoti_torch_dtype_float64(), "rows", "float64");
  if (row_numel % kRowColumns != 0)
    refuse(kOp, ": rows must be [K, ", kRowColumns + 0, "], got ", row_numel, " elements");
  // The host reads them, whatever the device.
  const Device cpu{aoti_torch_device_type_cpu(), 0};
  job.rows = static_cast<const double*>(memory_of(rows.tensors[i], kOp, "rows", cpu));
  flat.num_rows = row_numel / kRowColumns;
  for (int64_t r = 0; r < flat.num_rows; ++r) {
    const double* const row = job.rows + r * kRowColumns;
    const int wanted = row[kRowFlag] != 0.0 ? 3 : 2;
    if (job.num_states < wanted)
      refuse(kOp, ": row ", r, " needs ", wanted, " states, got ", job.num_states);
  }
  return flat;
}

}  // namespace layerzero
