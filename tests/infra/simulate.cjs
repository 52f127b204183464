// Evaluate requests with IAM Simulate: node simulate.cjs FOLDER_OF_NODE_MODULES < REQUESTS > DECISIONS
const { createRequire } = require('node:module')
const { readFileSync } = require('node:fs')

const { runSimulation } = createRequire(process.argv[2] + '/')('@cloud-copilot/iam-simulate')

async function decide(request) {
  const result = await runSimulation(
    {
      identityPolicies: request.policies.map((policy, index) => ({ name: `${index}`, policy })),
      serviceControlPolicies: [],
      resourceControlPolicies: [],
      resourcePolicy: request.resourcePolicy || undefined,
      request: {
        principal: request.principal,
        action: request.action,
        resource: { resource: request.resource, accountId: request.account },
        contextVariables: request.context
      }
    },
    {}
  )
  if (result.resultType === 'error') throw new Error(JSON.stringify([request.action, result.errors]))
  return result.overallResult
}

Promise.all(JSON.parse(readFileSync(0)).map(decide)).then((all) => console.log(JSON.stringify(all)))
